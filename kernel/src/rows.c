/* message_rows: the pending rows of stored batches (delayd/delay/rows.py has the record and the twin). */

#include "kernel.h"

#define HOUR_MS 3600000
#define COARSE_FROM_MS ((int64_t)1 << 30)
#define COARSE_MS 1000
#define COARSE_MAX (((int64_t)1 << 30) - 1)
#define ROW_BYTES 32
#define ROW_COLUMNS_BYTES 32   /* Columns of a row in a DISPATCH batch: due, sequence, headers, body, hash. */
#define TAGS_COLUMNS_BYTES 12
#define SPARSE_COLUMN_BYTES 8
#define ROW_BITS 16

typedef struct {
    Py_buffer bytes, numbers;
    Batch batch;
    uint64_t base_sequence, location;
} Stored;

static int64_t floor_hour(int64_t at_ms) {
    int64_t hour = at_ms / HOUR_MS;
    return at_ms % HOUR_MS < 0 ? hour - 1 : hour;
}

static int32_t encode_due(int64_t after_ms) {
    if (after_ms >= -COARSE_FROM_MS)
        return (int32_t)after_ms;
    int64_t coarse = (-COARSE_FROM_MS - after_ms) / COARSE_MS;
    return (int32_t)(-COARSE_FROM_MS - (coarse < COARSE_MAX ? coarse : COARSE_MAX));
}

/* Open one entry, delayd.delay.rows.Stored: offset, base sequence, batch; and the numbers of its subjects as u32. */
static bool open_stored(Stored *stored, PyObject *entry, PyObject *numbers) {
    if (entry == NULL || numbers == NULL)
        return false; /* The look-up of them in their lists has set the error. */
    if (!PyTuple_Check(entry) || PyTuple_Size(entry) != 3) {
        PyErr_SetString(PyExc_TypeError, "a stored batch is a tuple of three");
        return false;
    }
    uint64_t offset = PyLong_AsUnsignedLongLong(PyTuple_GetItem(entry, 0));
    stored->base_sequence = PyLong_AsUnsignedLongLong(PyTuple_GetItem(entry, 1));
    if (PyErr_Occurred() || !open_batch(&stored->batch, PyTuple_GetItem(entry, 2), &stored->bytes))
        return false;
    stored->location = offset << ROW_BITS;
    if (PyObject_GetBuffer(numbers, &stored->numbers, PyBUF_SIMPLE) == 0) {
        if (stored->batch.at[DELIVER_AT_MS] && stored->numbers.len >= 4)
            return true;
        PyErr_SetString(PyExc_ValueError, "a stored batch has instants and subjects");
        PyBuffer_Release(&stored->numbers);
    }
    PyBuffer_Release(&stored->bytes);
    return false;
}

/* Add the bytes that the items of a region need to the lengths of the rows. */
static void add_region(const Batch *batch, enum column column, uint8_t *rows) {
    uint64_t start = region_begin(batch, column), besides = column == TAGS_END ? TAGS_COLUMNS_BYTES : 0;
    for (uint32_t row = 0; row < batch->count; row++) {
        uint64_t end = end_of(batch, column, row);
        uint8_t *length = rows + ROW_BYTES * (size_t)row + 4;
        if (end > start)
            store_u32(length, (uint32_t)(load_u32(length) + padded(end - start) + besides));
        start = padded(end);
    }
}

static void add_sparse(const Batch *batch, enum column column, uint8_t *rows) {
    for (uint32_t row = 0; row < batch->count; row++) {
        uint8_t *length = rows + ROW_BYTES * (size_t)row + 4;
        if (load_u64(batch->bytes + batch->at[column] + 8 * (size_t)row))
            store_u32(length, load_u32(length) + SPARSE_COLUMN_BYTES);
    }
}

/* Write the rows of one batch; false, with a ValueError, if one has a subject that its table does not have. */
static bool write_rows(const Stored *stored, int64_t appended_at_ms, uint8_t *rows) {
    const Batch *batch = &stored->batch;
    const uint8_t *numbers = stored->numbers.buf;
    for (uint32_t row = 0; row < batch->count; row++) {
        uint8_t *record = rows + ROW_BYTES * (size_t)row;
        int64_t due = (int64_t)load_u64(batch->bytes + batch->at[DELIVER_AT_MS] + 8 * (size_t)row);
        int64_t hour = floor_hour(due > appended_at_ms ? due : appended_at_ms);
        size_t subject = batch->at[SUBJECT] ? load_u32(batch->bytes + batch->at[SUBJECT] + 4 * (size_t)row) : 0;
        if (subject >= (size_t)stored->numbers.len / 4) {
            PyErr_SetString(PyExc_ValueError, "a row has a subject that its batch does not name");
            return false;
        }
        /* Unsigned, because a damaged instant may be so low that a signed difference would overflow. */
        int64_t after_ms = (int64_t)((uint64_t)due - (uint64_t)hour * HOUR_MS);
        store_u32(record, (uint32_t)encode_due(after_ms));
        store_u32(record + 4, ROW_COLUMNS_BYTES);
        store_u32(record + 8, load_u32(numbers + 4 * subject));
        store_u32(record + 12, (uint32_t)hour);
        store_u64(record + 16, stored->base_sequence + row);
        store_u64(record + 24, stored->location | row);
    }
    for (enum column column = KEY_END; column <= BODY_END; column++)
        if (batch->at[column])
            add_region(batch, column, rows);
    if (batch->at[ORDERING_KEY_HASH])
        add_sparse(batch, ORDERING_KEY_HASH, rows);
    if (batch->at[EXPIRES_AT_MS])
        add_sparse(batch, EXPIRES_AT_MS, rows);
    return true;
}

/* message_rows(stored, numbers, appended_at_ms) -> bytearray of records */
PyObject *message_rows(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (!want_arguments("message_rows", count, 3))
        return NULL;
    PyObject *list = arguments[0], *numbers = arguments[1];
    int64_t appended_at_ms = PyLong_AsLongLong(arguments[2]);
    if (PyErr_Occurred())
        return NULL;
    if (!PyList_Check(list) || !PyList_Check(numbers) || PyList_Size(list) != PyList_Size(numbers)) {
        PyErr_SetString(PyExc_TypeError, "stored batches and the numbers of their subjects are lists of one length");
        return NULL;
    }
    Py_ssize_t batches = PyList_Size(list), opened = 0;
    Stored *stored = PyMem_Calloc((size_t)(batches ? batches : 1), sizeof *stored);
    if (stored == NULL)
        return PyErr_NoMemory();
    size_t rows = 0;
    PyObject *made = NULL;
    for (; opened < batches; opened++) {
        if (!open_stored(&stored[opened], PyList_GetItem(list, opened), PyList_GetItem(numbers, opened)))
            goto end;
        rows += stored[opened].batch.count;
    }
    made = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(rows * ROW_BYTES));
    if (made == NULL)
        goto end;
    uint8_t *record = (uint8_t *)PyByteArray_AsString(made);
    for (Py_ssize_t at = 0; at < batches; at++) {
        if (!write_rows(&stored[at], appended_at_ms, record)) {
            Py_DECREF(made);
            made = NULL;
            goto end;
        }
        record += ROW_BYTES * (size_t)stored[at].batch.count;
    }
end:
    while (opened > 0) {
        opened--;
        PyBuffer_Release(&stored[opened].numbers);
        PyBuffer_Release(&stored[opened].bytes);
    }
    PyMem_Free(stored);
    return made;
}
