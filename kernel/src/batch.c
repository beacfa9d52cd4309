/* A view of a batch (docs/formats/batch.md): where its columns and its heap are, checked against its bytes. */

#include "kernel.h"

#define MAGIC 0x48435442u

static const uint16_t WIDTHS[COLUMNS] = {
    [DELIVER_AT_MS] = 8, [SEQUENCE] = 8, [TAG_BLOOM] = 8, [SUBJECT] = 4, [KEY_END] = 4, [TAGS_END] = 4,
    [HEADERS_END] = 4, [BODY_END] = 4, [ORDERING_KEY_HASH] = 8, [EXPIRES_AT_MS] = 8, [CONTENT_HASH] = 8,
};

static bool fault(const char *what) {
    PyErr_SetString(PyExc_ValueError, what);
    return false;
}

static bool view_batch(Batch *batch, const Py_buffer *buffer) {
    const uint8_t *bytes = buffer->buf;
    memset(batch, 0, sizeof *batch);
    if (buffer->len < (Py_ssize_t)HEADER_BYTES || load_u32(bytes) != MAGIC)
        return fault("these bytes are no batch");
    uint64_t total = load_u32(bytes + 8), count = load_u32(bytes + 12), heap_at = load_u32(bytes + 16);
    uint64_t column_count = load_u16(bytes + 20), kind_bytes = load_u16(bytes + 22), subjects = load_u32(bytes + 24);
    uint64_t columns = HEADER_BYTES + kind_bytes + ENTRY_BYTES * column_count;
    if (total > (uint64_t)buffer->len || heap_at > total || columns > heap_at || !count || count > ROWS_MAX)
        return fault("the header of a batch does not fit its bytes");
    for (uint64_t entry = HEADER_BYTES + kind_bytes; entry < columns; entry += ENTRY_BYTES) {
        uint16_t column = load_u16(bytes + entry), width = load_u16(bytes + entry + 2);
        uint64_t offset = load_u32(bytes + entry + 4);
        if (column >= COLUMNS || !WIDTHS[column])
            continue;
        if (width != WIDTHS[column] || offset < columns || offset + width * count > heap_at)
            return fault("a column is not within its batch");
        batch->at[column] = (uint32_t)offset;
    }
    batch->bytes = bytes;
    batch->heap_bytes = total - heap_at;
    batch->count = (uint32_t)count;
    batch->heap_at = (uint32_t)heap_at;
    if (subjects) {
        if (4 * subjects > batch->heap_bytes)
            return fault("a subject table is not within its heap");
        batch->begin = padded(4 * subjects) + padded(load_u32(bytes + heap_at + 4 * subjects - 4));
        if (batch->begin > batch->heap_bytes)
            return fault("a subject table is not within its heap");
    }
    return true;
}

bool open_batch(Batch *batch, PyObject *object, Py_buffer *buffer) {
    if (object == NULL)
        return false; /* The look-up of it in a list has set the error. */
    PyObject *bytes = PyObject_GetAttrString(object, "buffer");
    if (bytes == NULL)
        return false;
    int got = PyObject_GetBuffer(bytes, buffer, PyBUF_SIMPLE);
    Py_DECREF(bytes); /* The view holds it. */
    if (got < 0)
        return false;
    if (view_batch(batch, buffer))
        return true;
    PyBuffer_Release(buffer);
    return false;
}

uint64_t region_begin(const Batch *batch, enum column column) {
    uint64_t begin = batch->begin;
    for (enum column other = KEY_END; other < column; other++)
        if (batch->at[other])
            begin = padded(end_of(batch, other, batch->count - 1));
    return begin;
}

bool item_view(const Batch *batch, enum column column, uint32_t row, uint64_t *start, uint64_t *end) {
    *start = row ? padded(end_of(batch, column, row - 1)) : region_begin(batch, column);
    *end = end_of(batch, column, row);
    if (*end < *start || padded(*end) > batch->heap_bytes)
        return fault("an item is not within its heap");
    return true;
}
