/* pick_rows: a few rows of stored batches, copied into the columns and the heap of a DISPATCH batch, with the content
   hash of each (docs/formats/content.md). */

#include "kernel.h"

#define PICKED_MAX 1024
#define ROW_BYTES 32 /* delayd/delay/rows.py: a row's sequence is its bytes 16 to 23, its location 24 to 31. */
#define ROW_MASK 0xffffu
#define STEP 0x9E3779B97F4A7C15u
#define FACTOR 0xD6E8FEB86659FD93u
#define FACTORS 1024

typedef struct {
    Py_buffer buffer;
    Batch batch;
    uint32_t row;
    uint64_t start[COLUMNS], end[COLUMNS]; /* Of the row's item in each region; both 0 where it has none. */
} Source;

static uint64_t factors[FACTORS]; /* Of the first halves of an item; those behind them are computed when needed. */

static uint64_t mix(uint64_t number) {
    for (int turn = 0; turn < 2; turn++) {
        number ^= number >> 32;
        number *= FACTOR;
    }
    return number ^ number >> 32;
}

static uint64_t factor_of(uint64_t place) { return mix((place + 2) * STEP) | 1; }

void make_factors(void) {
    for (uint64_t place = 0; place < FACTORS; place++)
        factors[place] = factor_of(place);
}

/* The value of an item of ``size`` bytes, which stands in whole words that end in zeros. */
static uint64_t value_of(const uint8_t *item, uint64_t size) {
    uint64_t value = size * (mix(STEP) | 1), halves = padded(size) / 4;
    for (uint64_t place = 0; place < halves; place++)
        value += load_u32(item + 4 * place) * (place < FACTORS ? factors[place] : factor_of(place));
    return value;
}

/* Where the directory, the columns and the heap of the new batch are. */
typedef struct {
    uint32_t rows;
    uint16_t columns;
    bool has[COLUMNS];
    uint64_t front_bytes, heap_bytes, table_bytes;
} Layout;

static const enum column CARRIED[] = {DELIVER_AT_MS, SEQUENCE, TAG_BLOOM, KEY_END, TAGS_END, HEADERS_END,
                                      BODY_END, ORDERING_KEY_HASH, EXPIRES_AT_MS, CONTENT_HASH};

#define CARRIED_COUNT (sizeof CARRIED / sizeof *CARRIED)

static uint16_t width_of(enum column column) { return column >= KEY_END && column <= BODY_END ? 4 : 8; }

static bool plan(Layout *layout, Source *sources, uint64_t subject_bytes) {
    uint64_t rows = layout->rows;
    layout->has[DELIVER_AT_MS] = layout->has[SEQUENCE] = layout->has[BODY_END] = layout->has[CONTENT_HASH] = true;
    layout->table_bytes = layout->heap_bytes = 8 + padded(subject_bytes);
    for (uint64_t at = 0; at < rows; at++) {
        Source *source = &sources[at];
        if (!source->batch.at[DELIVER_AT_MS] || !source->batch.at[BODY_END] || source->row >= source->batch.count) {
            PyErr_SetString(PyExc_ValueError, "a stored batch does not have this row");
            return false;
        }
        for (size_t carried = 0; carried < CARRIED_COUNT; carried++) {
            enum column column = CARRIED[carried];
            if (!source->batch.at[column])
                continue;
            layout->has[column] = true;
            if (column < KEY_END || column > BODY_END)
                continue;
            if (!item_view(&source->batch, column, source->row, &source->start[column], &source->end[column]))
                return false;
            layout->heap_bytes += padded(source->end[column]) - source->start[column];
        }
    }
    for (size_t carried = 0; carried < CARRIED_COUNT; carried++)
        if (layout->has[CARRIED[carried]]) {
            layout->columns++;
            layout->front_bytes += ENTRY_BYTES + padded(width_of(CARRIED[carried]) * rows);
        }
    if (layout->heap_bytes > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "these items are too large for a batch");
        return false;
    }
    return true;
}

/* The content hash that a row's batch states, or else the one of its bytes. */
static uint64_t hash_of(const Source *source, uint64_t state) {
    const Batch *batch = &source->batch;
    const uint8_t *heap = batch->bytes + batch->heap_at;
    if (batch->at[CONTENT_HASH]) {
        uint64_t stated = load_u64(batch->bytes + batch->at[CONTENT_HASH] + 8 * (size_t)source->row);
        if (stated)
            return stated;
    }
    uint64_t start = source->start[HEADERS_END], size = source->end[HEADERS_END] - start;
    uint64_t hash = mix(state + (size ? value_of(heap + start, size) : 0));
    start = source->start[BODY_END];
    hash += value_of(heap + start, source->end[BODY_END] - start);
    return hash ? hash : 1;
}

static uint64_t value_in(const Source *source, enum column column) {
    uint32_t at = source->batch.at[column];
    return at ? load_u64(source->batch.bytes + at + 8 * (size_t)source->row) : 0;
}

/* Write one column of all rows, and the items of its region behind ``begin`` of the heap; return where they end. */
static uint64_t write_column(enum column column, const Source *sources, uint32_t rows, uint8_t *into, uint8_t *heap,
                             uint64_t begin) {
    for (uint32_t at = 0; at < rows; at++) {
        const Source *source = &sources[at];
        if (width_of(column) == 8) {
            store_u64(into + 8 * (size_t)at, value_in(source, column));
            continue;
        }
        uint64_t start = source->start[column], size = source->end[column] - start;
        memcpy(heap + begin, source->batch.bytes + source->batch.heap_at + start, padded(size));
        store_u32(into + 4 * (size_t)at, (uint32_t)(begin + size));
        begin += padded(size);
    }
    return begin;
}

static void write_table(uint8_t *heap, const uint8_t *subject, uint64_t size) {
    memset(heap, 0, 8 + padded(size));
    store_u32(heap, (uint32_t)size);
    memcpy(heap + 8, subject, size);
}

static PyObject *write_batch(uint32_t base, const Py_buffer *subject, const Py_buffer *records, const Source *sources,
                             const Layout *layout) {
    Py_ssize_t numbers = 8 * (Py_ssize_t)layout->rows;
    PyObject *front = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)layout->front_bytes);
    PyObject *heap = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)layout->heap_bytes);
    PyObject *due = PyBytes_FromStringAndSize(NULL, numbers), *hashes = PyBytes_FromStringAndSize(NULL, numbers);
    PyObject *made = NULL;
    if (front == NULL || heap == NULL || due == NULL || hashes == NULL)
        goto end;
    uint8_t *entry = (uint8_t *)PyBytes_AsString(front), *into = entry + ENTRY_BYTES * layout->columns;
    uint8_t *words = (uint8_t *)PyBytes_AsString(heap);
    uint64_t begin = layout->table_bytes;
    uint64_t offset = base + ENTRY_BYTES * (uint64_t)layout->columns;
    write_table(words, subject->buf, (uint64_t)subject->len);
    uint64_t state = mix(value_of(words + 8, (uint64_t)subject->len));
    for (size_t carried = 0; carried < CARRIED_COUNT; carried++) {
        enum column column = CARRIED[carried];
        uint64_t size = width_of(column) * (uint64_t)layout->rows;
        if (!layout->has[column])
            continue;
        store_entry(entry, (uint16_t)column, width_of(column), (uint32_t)offset);
        if (column == SEQUENCE)
            for (uint32_t at = 0; at < layout->rows; at++)
                memcpy(into + 8 * (size_t)at, (const uint8_t *)records->buf + ROW_BYTES * (size_t)at + 16, 8);
        else if (column == CONTENT_HASH)
            for (uint32_t at = 0; at < layout->rows; at++)
                store_u64(into + 8 * (size_t)at, hash_of(&sources[at], state));
        else
            begin = write_column(column, sources, layout->rows, into, words, begin);
        if (column == DELIVER_AT_MS)
            memcpy(PyBytes_AsString(due), into, (size_t)numbers);
        if (column == CONTENT_HASH)
            memcpy(PyBytes_AsString(hashes), into, (size_t)numbers);
        memset(into + size, 0, padded(size) - size);
        entry += ENTRY_BYTES;
        into += padded(size);
        offset += padded(size);
    }
    made = Py_BuildValue("OOOO", front, heap, due, hashes);
end:
    Py_XDECREF(front);
    Py_XDECREF(heap);
    Py_XDECREF(due);
    Py_XDECREF(hashes);
    return made;
}

/* pick_rows(base, subject, rows, batches) -> (directory and columns, heap, deliver_at_ms, content hashes);
   ``rows`` are records of delayd.delay.rows, and ``batches`` the verified batch of each */
PyObject *pick_rows(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (!want_arguments("pick_rows", count, 4))
        return NULL;
    unsigned long base = PyLong_AsUnsignedLong(arguments[0]);
    Py_buffer subject, records;
    if (PyErr_Occurred() || PyObject_GetBuffer(arguments[1], &subject, PyBUF_SIMPLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(arguments[2], &records, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&subject);
        return NULL;
    }
    PyObject *batches = arguments[3], *made = NULL;
    Py_ssize_t rows = records.len / ROW_BYTES, opened = 0;
    Source *sources = NULL;
    if (!PyList_Check(batches) || PyList_Size(batches) != rows || rows < 1 || rows > PICKED_MAX || base > UINT16_MAX ||
        subject.len < 1 || subject.len > UINT16_MAX) {
        PyErr_SetString(PyExc_ValueError, "rows are 1 to 1,024, with a list of the batch of each, and a subject");
        goto end;
    }
    sources = PyMem_Calloc((size_t)rows, sizeof *sources);
    if (sources == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    Layout layout = {.rows = (uint32_t)rows};
    for (; opened < rows; opened++) {
        Source *source = &sources[opened];
        if (!open_batch(&source->batch, PyList_GetItem(batches, opened), &source->buffer))
            goto end;
        source->row = (uint32_t)load_u64((const uint8_t *)records.buf + ROW_BYTES * opened + 24) & ROW_MASK;
    }
    if (plan(&layout, sources, (uint64_t)subject.len))
        made = write_batch((uint32_t)base, &subject, &records, sources, &layout);
end:
    while (opened > 0)
        PyBuffer_Release(&sources[--opened].buffer);
    PyMem_Free(sources);
    PyBuffer_Release(&records);
    PyBuffer_Release(&subject);
    return made;
}
