/* pack_columns: directory, columns and heap of a new batch, from columns and from items that a caller holds. */

#include "kernel.h"

#define COLUMNS_MAX 32

typedef struct {
    uint16_t id;
    Py_buffer values;    /* Of a column without a region. */
    PyObject *items;     /* Of a region: a list or a tuple. */
    bool is_list;
} Column;

static PyObject *item_at(const Column *column, Py_ssize_t at) {
    return column->is_list ? PyList_GetItem(column->items, at) : PyTuple_GetItem(column->items, at);
}

static bool fault(const char *what) {
    PyErr_SetString(PyExc_ValueError, what);
    return false;
}

/* Read (number, values) into a column; values are a buffer, or, of a region, a tuple that begins with the items. */
static bool open_column(Column *column, PyObject *pair) {
    if (pair == NULL || !PyTuple_Check(pair) || PyTuple_Size(pair) != 2) {
        PyErr_SetString(PyExc_TypeError, "a column is a tuple of two");
        return false;
    }
    unsigned long id = PyLong_AsUnsignedLong(PyTuple_GetItem(pair, 0));
    if (PyErr_Occurred())
        return false;
    if (id > UINT16_MAX)
        return fault("a column has a number of 16 bits");
    column->id = (uint16_t)id;
    PyObject *values = PyTuple_GetItem(pair, 1);
    if (!PyTuple_Check(values))
        return PyObject_GetBuffer(values, &column->values, PyBUF_SIMPLE) == 0;
    PyObject *items = PyTuple_Size(values) ? PyTuple_GetItem(values, 0) : NULL;
    if (items == NULL || !(PyList_CheckExact(items) || PyTuple_CheckExact(items))) {
        PyErr_SetString(PyExc_TypeError, "the items of a region are a list or a tuple");
        return false;
    }
    column->is_list = PyList_CheckExact(items);
    column->items = Py_NewRef(items);
    return true;
}

static void close_columns(Column *columns, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) {
        if (columns[at].items != NULL)
            Py_DECREF(columns[at].items);
        else
            PyBuffer_Release(&columns[at].values);
    }
}

/* The number of items in the first region; 0 without a region. */
static Py_ssize_t row_count(const Column *columns, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++)
        if (columns[at].items != NULL)
            return columns[at].is_list ? PyList_Size(columns[at].items) : PyTuple_Size(columns[at].items);
    return 0;
}

/* The bytes that the items of all regions take in the heap; false if one is not bytes, or they have no u32 ends. From
   here on no Python code runs, so lists stay as they are. */
static bool measure(const Column *columns, Py_ssize_t count, Py_ssize_t rows, uint64_t *heap_bytes) {
    for (Py_ssize_t at = 0; at < count; at++) {
        const Column *column = &columns[at];
        if (column->items == NULL) {
            if (column->values.len % rows || column->values.len / rows > UINT16_MAX)
                return fault("a column has a value for each row");
            continue;
        }
        if ((column->is_list ? PyList_Size(column->items) : PyTuple_Size(column->items)) != rows)
            return fault("a region has an item for each row");
        for (Py_ssize_t row = 0; row < rows; row++) {
            PyObject *item = item_at(column, row);
            if (!PyBytes_Check(item)) {
                PyErr_SetString(PyExc_TypeError, "an item of a region is bytes");
                return false;
            }
            *heap_bytes += padded((uint64_t)PyBytes_Size(item));
            if (*heap_bytes > UINT32_MAX)
                return fault("these items are too large for a batch");
        }
    }
    return true;
}

/* Copy the items of a region behind ``begin`` of the heap, and their ends into ``ends``; return where they end. */
static uint64_t lay_out(const Column *column, Py_ssize_t rows, uint64_t begin, uint8_t *heap, uint8_t *ends) {
    for (Py_ssize_t row = 0; row < rows; row++) {
        PyObject *item = item_at(column, row);
        uint64_t size = (uint64_t)PyBytes_Size(item), whole = padded(size);
        memcpy(heap + begin, PyBytes_AsString(item), size);
        memset(heap + begin + size, 0, whole - size);
        store_u32(ends + 4 * row, (uint32_t)(begin + size));
        begin += whole;
    }
    return begin;
}

static PyObject *pack(uint32_t base, const Py_buffer *table, const Column *columns, Py_ssize_t count) {
    Py_ssize_t rows = row_count(columns, count);
    uint64_t heap_bytes = (uint64_t)table->len, front_bytes = ENTRY_BYTES * (uint64_t)count;
    if (heap_bytes % 8 || rows < 1 || rows > (Py_ssize_t)ROWS_MAX) {
        PyErr_SetString(PyExc_ValueError, "a batch has whole words of subjects, and 1 to 65,536 rows");
        return NULL;
    }
    if (!measure(columns, count, rows, &heap_bytes))
        return NULL;
    for (Py_ssize_t at = 0; at < count; at++)
        front_bytes += padded(columns[at].items == NULL ? (uint64_t)columns[at].values.len : 4 * (uint64_t)rows);
    if (base + front_bytes > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "these columns are too large for a batch");
        return NULL;
    }
    PyObject *front = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)front_bytes);
    PyObject *heap = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)heap_bytes);
    if (front == NULL || heap == NULL) {
        Py_XDECREF(front);
        Py_XDECREF(heap);
        return NULL;
    }
    uint8_t *entry = (uint8_t *)PyBytes_AsString(front), *into = entry + ENTRY_BYTES * (size_t)count;
    uint8_t *words = (uint8_t *)PyBytes_AsString(heap);
    uint64_t begin = (uint64_t)table->len, offset = base + ENTRY_BYTES * (uint64_t)count;
    memcpy(words, table->buf, (size_t)table->len);
    for (Py_ssize_t at = 0; at < count; at++, entry += ENTRY_BYTES) {
        const Column *column = &columns[at];
        uint64_t size = column->items == NULL ? (uint64_t)column->values.len : 4 * (uint64_t)rows;
        store_entry(entry, column->id, (uint16_t)(size / (uint64_t)rows), (uint32_t)offset);
        if (column->items == NULL)
            memcpy(into, column->values.buf, size);
        else
            begin = lay_out(column, rows, begin, words, into);
        memset(into + size, 0, padded(size) - size);
        into += padded(size);
        offset += padded(size);
    }
    PyObject *made = PyTuple_Pack(2, front, heap);
    Py_DECREF(front);
    Py_DECREF(heap);
    return made;
}

/* pack_columns(base, table, columns) -> (directory and columns, heap); columns are a list of (number, values), and
   offsets in the directory count from ``base`` bytes before it */
PyObject *pack_columns(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (!want_arguments("pack_columns", count, 3))
        return NULL;
    unsigned long base = PyLong_AsUnsignedLong(arguments[0]);
    PyObject *list = arguments[2];
    Py_ssize_t opened = 0;
    if (PyErr_Occurred())
        return NULL;
    if (base > UINT16_MAX || !PyList_Check(list) || PyList_Size(list) > COLUMNS_MAX) {
        PyErr_SetString(PyExc_ValueError, "a batch has a list of at most 32 columns");
        return NULL;
    }
    Py_buffer table;
    if (PyObject_GetBuffer(arguments[1], &table, PyBUF_SIMPLE) < 0)
        return NULL;
    Column columns[COLUMNS_MAX];
    memset(columns, 0, sizeof columns);
    PyObject *made = NULL;
    bool all = true;
    while (all && opened < COLUMNS_MAX && opened < PyList_Size(list)) {
        all = open_column(&columns[opened], PyList_GetItem(list, opened));
        opened += all;
    }
    if (all)
        made = pack((uint32_t)base, &table, columns, opened);
    close_columns(columns, opened);
    PyBuffer_Release(&table);
    return made;
}
