/* What all pieces share: the limited API, numbers in bytes, and a view of a batch whose bounds were checked.

   Every piece does what its twin in delayd does, byte by byte (tests/unit/test_kernel.py). A piece trusts no length:
   each one is compared with the bytes that are there before anything is read or written. */

#ifndef DELAYD_KERNEL_H
#define DELAYD_KERNEL_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000 /* Python 3.11: the first with buffers in the limited API. */
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "batches are little-endian, and these pieces copy their numbers as they are"
#endif

/* delayd/batch/columns.py has the whole table. */
enum column {
    DELIVER_AT_MS = 1,
    SEQUENCE = 2,
    TAG_BLOOM = 4,
    SUBJECT = 5,
    KEY_END = 6,
    TAGS_END = 7,
    HEADERS_END = 8,
    BODY_END = 9,
    ORDERING_KEY_HASH = 14,
    EXPIRES_AT_MS = 15,
    CONTENT_HASH = 19,
    COLUMNS = 20 /* No piece reads a column from this id on. */
};

#define ROWS_MAX 65536u
#define HEADER_BYTES 40u
#define ENTRY_BYTES 8u

typedef struct {
    const uint8_t *bytes;
    uint64_t heap_bytes;
    uint64_t begin;       /* Where the first region begins, from the heap's start. */
    uint32_t count;
    uint32_t heap_at;
    uint32_t at[COLUMNS]; /* Where a column begins; 0: the batch does not have it. */
} Batch;

static inline uint64_t padded(uint64_t size) { return (size + 7) & ~(uint64_t)7; }

static inline uint16_t load_u16(const uint8_t *at) {
    uint16_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline uint32_t load_u32(const uint8_t *at) {
    uint32_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline uint64_t load_u64(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline void store_u16(uint8_t *at, uint16_t value) { memcpy(at, &value, sizeof value); }
static inline void store_u32(uint8_t *at, uint32_t value) { memcpy(at, &value, sizeof value); }
static inline void store_u64(uint8_t *at, uint64_t value) { memcpy(at, &value, sizeof value); }

/* One entry of a column directory. */
static inline void store_entry(uint8_t *at, uint16_t column, uint16_t width, uint32_t offset) {
    store_u16(at, column);
    store_u16(at + 2, width);
    store_u32(at + 4, offset);
}

/* The end of a row's item, which the column must have. */
static inline uint32_t end_of(const Batch *batch, enum column column, uint32_t row) {
    return load_u32(batch->bytes + batch->at[column] + 4 * (size_t)row);
}

/* View the batch of a delayd.batch.batch.Batch, whose bytes are held until PyBuffer_Release; false, with a ValueError
   and without bytes to release, if its columns or its subject table are not within them. */
bool open_batch(Batch *batch, PyObject *object, Py_buffer *buffer);

/* Where the first item of a region begins, which the batch must have; it may lie outside of a damaged heap. */
uint64_t region_begin(const Batch *batch, enum column column);

/* Where an item lies in the heap; false, with a ValueError, if that is not within it. */
bool item_view(const Batch *batch, enum column column, uint32_t row, uint64_t *start, uint64_t *end);

/* False, with a TypeError, unless a piece got so many arguments. */
bool want_arguments(const char *name, Py_ssize_t got, Py_ssize_t wanted);

PyObject *message_rows(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *lengths_of(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *cut_items(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *items_fit(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *pack_columns(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
PyObject *pick_rows(PyObject *module, PyObject *const *arguments, Py_ssize_t count);
void make_factors(void);

/* Put the type `lane` into the module; -1 with an error. */
int add_lane(PyObject *module);

#endif
