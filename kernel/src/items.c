/* Items of regions: how long they are, whether they fit, and copies of them as bytes. */

#include "kernel.h"

/* lengths_of(items) -> bytearray of int64, or None if an item is of another type than bytes itself */
PyObject *lengths_of(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    if (!want_arguments("lengths_of", count, 1))
        return NULL;
    PyObject *items = arguments[0], *made = NULL;
    bool is_list = PyList_CheckExact(items);
    if (!is_list && !PyTuple_CheckExact(items)) {
        items = PySequence_Tuple(items);
        if (items == NULL)
            return NULL;
    } else {
        Py_INCREF(items);
    }
    /* Nothing below runs Python code, so the list stays as long as it is. */
    Py_ssize_t total = is_list ? PyList_Size(items) : PyTuple_Size(items);
    made = PyByteArray_FromStringAndSize(NULL, 8 * total);
    if (made == NULL)
        goto end;
    uint8_t *lengths = (uint8_t *)PyByteArray_AsString(made);
    for (Py_ssize_t at = 0; at < total; at++) {
        PyObject *item = is_list ? PyList_GetItem(items, at) : PyTuple_GetItem(items, at);
        if (!PyBytes_CheckExact(item)) {
            Py_DECREF(made);
            made = Py_NewRef(Py_None);
            goto end;
        }
        store_u64(lengths + 8 * at, (uint64_t)PyBytes_Size(item));
    }
end:
    Py_DECREF(items);
    return made;
}

/* cut_items(batch, column, first, stop) -> list of the items of rows first to stop, each as bytes */
PyObject *cut_items(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    Batch batch;
    Py_buffer buffer;
    if (!want_arguments("cut_items", count, 4))
        return NULL;
    unsigned long column = PyLong_AsUnsignedLong(arguments[1]);
    unsigned long first = PyLong_AsUnsignedLong(arguments[2]), stop = PyLong_AsUnsignedLong(arguments[3]);
    if (PyErr_Occurred() || !open_batch(&batch, arguments[0], &buffer))
        return NULL;
    PyObject *items = NULL;
    if (column < KEY_END || column > BODY_END || !batch.at[column] || first > stop || stop > batch.count) {
        PyErr_SetString(PyExc_ValueError, "a batch does not have these items");
        goto end;
    }
    items = PyList_New((Py_ssize_t)(stop - first));
    for (unsigned long row = first; items != NULL && row < stop; row++) {
        uint64_t start, until;
        PyObject *item = NULL;
        if (item_view(&batch, (enum column)column, (uint32_t)row, &start, &until))
            item = PyBytes_FromStringAndSize((const char *)batch.bytes + batch.heap_at + start,
                                             (Py_ssize_t)(until - start));
        if (item == NULL || PyList_SetItem(items, (Py_ssize_t)(row - first), item) < 0) {
            Py_DECREF(items);
            items = NULL;
        }
    }
end:
    PyBuffer_Release(&buffer);
    return items;
}

/* Whether the items of a region rise from ``start`` on within the heap, with zeros between them; moves ``start`` behind
   the last one, and notes the longest. */
static bool region_fits(const Batch *batch, enum column column, uint64_t *start, uint64_t *longest) {
    const uint8_t *heap = batch->bytes + batch->heap_at;
    *longest = 0;
    for (uint32_t row = 0; row < batch->count; row++) {
        uint64_t end = end_of(batch, column, row), behind = padded(end);
        if (end < *start || behind > batch->heap_bytes)
            return false;
        for (uint64_t pad = end; pad < behind; pad++)
            if (heap[pad])
                return false;
        if (end - *start > *longest)
            *longest = end - *start;
        *start = behind;
    }
    return true;
}

/* items_fit(batch, headers_bytes_max, message_bytes_max) -> whether all items are certainly valid; when they may not
   be, the twin of this piece finds out and says what is wrong */
PyObject *items_fit(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    (void)module;
    Batch batch;
    Py_buffer buffer;
    if (!want_arguments("items_fit", count, 3))
        return NULL;
    uint64_t headers_max = PyLong_AsUnsignedLongLong(arguments[1]);
    uint64_t message_max = PyLong_AsUnsignedLongLong(arguments[2]);
    if (PyErr_Occurred())
        return NULL;
    if (!open_batch(&batch, arguments[0], &buffer)) {
        if (!PyErr_ExceptionMatches(PyExc_ValueError))
            return NULL;
        PyErr_Clear();
        return Py_NewRef(Py_False);
    }
    uint64_t start = batch.begin, message = 0;
    bool fit = true;
    for (enum column column = KEY_END; fit && column <= BODY_END; column++) {
        uint64_t longest;
        if (!batch.at[column])
            continue;
        fit = region_fits(&batch, column, &start, &longest);
        fit = fit && (column != HEADERS_END || longest <= headers_max);
        if (column == HEADERS_END || column == BODY_END)
            message += longest;
    }
    fit = fit && start == batch.heap_bytes && message <= message_max;
    PyBuffer_Release(&buffer);
    return PyBool_FromLong(fit);
}
