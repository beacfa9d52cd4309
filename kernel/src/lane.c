/* lane: the system calls of a thread, without the interpreter's lock; delayd/machine/lane.py has the twin and the words.

   One thread waits in `wait`; all other methods but `end` belong to the loop. The mutex guards the two lists and is held
   for some instructions only, so either side may take it with the interpreter's lock or without. `asked` counts what
   `wait` has to look at, as the SimpleQueue of the twin does. */

#define _GNU_SOURCE
#include "kernel.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <semaphore.h>
#include <stddef.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

typedef struct Item {
    struct Item *next;
    PyObject *result; /* What `end` was given; NULL: these are calls, or a signal. */
    bool signal;
    int descriptor;
    PyObject *sync; /* Whom to call with the errno of a failed sync; NULL: there is no sync. */
    int outcome; /* 0; the errno of a write that counts for nothing; -errno of a sync. */
    off_t position;
    size_t count;
    Py_buffer *views;
    struct iovec parts[];
} Item;

typedef struct {
    Item *first, *last;
} List;

typedef struct {
    PyObject_HEAD
    int event;      /* An eventfd that is readable while something has ended. */
    bool stopped;
    bool failed;    /* Whether calls failed: those behind them are not begun. */
    size_t calls;   /* Calls that were added and not taken by `ended`; of the loop alone. */
    sem_t asked;
    pthread_mutex_t lock;
    List added, ended;
} Lane;

static void put(List *list, Item *item) {
    item->next = NULL;
    if (list->last)
        list->last->next = item;
    else
        list->first = item;
    list->last = item;
}

static Item *take(List *list) {
    Item *item = list->first;
    if (item) {
        list->first = item->next;
        if (!list->first)
            list->last = NULL;
    }
    return item;
}

static List take_all(List *list) {
    List all = *list;
    list->first = list->last = NULL;
    return all;
}

/* An item for so many buffers, of which it has none yet; NULL with a MemoryError. */
static Item *new_item(size_t count) {
    Item *item = PyMem_Calloc(1, sizeof *item + count * (sizeof *item->parts + sizeof *item->views));
    if (!item)
        PyErr_NoMemory();
    else
        item->views = (Py_buffer *)(item->parts + count);
    return item;
}

static void free_item(Item *item) {
    for (size_t at = 0; at < item->count; at++)
        PyBuffer_Release(item->views + at);
    Py_XDECREF(item->result);
    Py_XDECREF(item->sync);
    PyMem_Free(item);
}

/* Write all parts, also if the system takes only some bytes at a time; 0, or the errno. */
static int write_all(Item *item) {
    struct iovec *part = item->parts, *end = part + item->count;
    off_t position = item->position;
    for (;;) {
        while (part < end && !part->iov_len)
            part++;
        if (part == end)
            return 0;
        ptrdiff_t count = end - part;
        ssize_t written = pwritev(item->descriptor, part, (int)(count > IOV_MAX ? IOV_MAX : count), position);
        if (written < 0 && errno == EINTR)
            continue;
        if (written <= 0)
            return written ? errno : EIO;
        position += written;
        for (size_t left = (size_t)written; left;) {
            size_t some = left < part->iov_len ? left : part->iov_len;
            part->iov_base = (char *)part->iov_base + some;
            part->iov_len -= some;
            left -= some;
            part += !part->iov_len;
        }
    }
}

static void call(Item *item) {
    item->outcome = write_all(item);
    if (item->outcome || !item->sync)
        return;
    while (fdatasync(item->descriptor))
        if (errno != EINTR) {
            item->outcome = -errno;
            return;
        }
}

/* No other sync counts from now on, whenever the loop hears of this one. */
static void note_failed_sync(Item *item) {
    PyObject *noted = PyObject_CallFunction(item->sync, "i", -item->outcome);
    if (!noted)
        PyErr_WriteUnraisable(item->sync);
    Py_XDECREF(noted);
}

static void note_end(Lane *lane, Item *item) {
    pthread_mutex_lock(&lane->lock);
    /* Whoever empties the list has read the event before, so one event is enough for all that is in it. */
    bool tell = !lane->ended.first;
    put(&lane->ended, item);
    pthread_mutex_unlock(&lane->lock);
    uint64_t one = 1;
    while (tell && write(lane->event, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

/* Wait for the next item and take it; NULL: the lane was stopped. */
static Item *next_item(Lane *lane, bool *failed) {
    while (sem_wait(&lane->asked))
        ;
    pthread_mutex_lock(&lane->lock);
    Item *item = lane->stopped ? NULL : take(&lane->added);
    *failed = lane->failed;
    pthread_mutex_unlock(&lane->lock);
    return item;
}

static PyObject *lane_wait(Lane *lane, PyObject *ignored) {
    (void)ignored;
    Item *item;
    bool failed;
    PyThreadState *state = PyEval_SaveThread();
    while ((item = next_item(lane, &failed)) && !item->signal) {
        item->outcome = ECANCELED;
        if (!failed)
            call(item);
        if (item->outcome < 0) {
            PyEval_RestoreThread(state);
            note_failed_sync(item);
            state = PyEval_SaveThread();
        }
        if (item->outcome) {
            pthread_mutex_lock(&lane->lock);
            lane->failed = true;
            pthread_mutex_unlock(&lane->lock);
        }
        note_end(lane, item); /* From here on it is the loop's, which frees it. */
    }
    PyEval_RestoreThread(state);
    if (!item)
        Py_RETURN_FALSE;
    free_item(item);
    Py_RETURN_TRUE;
}

static void add(Lane *lane, Item *item) {
    pthread_mutex_lock(&lane->lock);
    put(&lane->added, item);
    pthread_mutex_unlock(&lane->lock);
    sem_post(&lane->asked);
}

static PyObject *lane_signal(Lane *lane, PyObject *ignored) {
    (void)ignored;
    Item *item = new_item(0);
    if (!item)
        return NULL;
    item->signal = true;
    add(lane, item);
    Py_RETURN_NONE;
}

static PyObject *lane_stop(Lane *lane, PyObject *ignored) {
    (void)ignored;
    pthread_mutex_lock(&lane->lock);
    lane->stopped = true;
    pthread_mutex_unlock(&lane->lock);
    sem_post(&lane->asked);
    Py_RETURN_NONE;
}

static PyObject *lane_end(Lane *lane, PyObject *result) {
    Item *item = new_item(0);
    if (!item)
        return NULL;
    Py_INCREF(result);
    item->result = result;
    note_end(lane, item);
    Py_RETURN_NONE;
}

static PyObject *lane_add(Lane *lane, PyObject *const *arguments, Py_ssize_t given) {
    if (!want_arguments("add", given, 4))
        return NULL;
    int descriptor = (int)PyLong_AsLong(arguments[0]);
    Py_ssize_t count = PyList_Size(arguments[1]);
    long long position = PyLong_AsLongLong(arguments[2]);
    bool sync = arguments[3] != Py_None;
    if (PyErr_Occurred())
        return NULL;
    if (sync && !PyCallable_Check(arguments[3])) {
        PyErr_SetString(PyExc_TypeError, "sync is None, or is called when the sync has failed");
        return NULL;
    }
    Item *item = new_item((size_t)count);
    if (!item)
        return NULL;
    item->descriptor = descriptor;
    item->position = position;
    item->sync = sync ? Py_NewRef(arguments[3]) : NULL;
    for (; item->count < (size_t)count; item->count++) {
        Py_buffer *view = item->views + item->count;
        PyObject *buffer = PyList_GetItem(arguments[1], (Py_ssize_t)item->count);
        if (!buffer || PyObject_GetBuffer(buffer, view, PyBUF_SIMPLE)) {
            free_item(item);
            return NULL;
        }
        item->parts[item->count].iov_base = view->buf;
        item->parts[item->count].iov_len = (size_t)view->len;
    }
    lane->calls++;
    add(lane, item);
    Py_RETURN_NONE;
}

static PyObject *lane_ended(Lane *lane, PyObject *ignored) {
    (void)ignored;
    PyObject *results = PyList_New(0);
    if (!results)
        return NULL;
    uint64_t events;
    while (read(lane->event, &events, sizeof events) < 0 && errno == EINTR)
        ;
    pthread_mutex_lock(&lane->lock);
    List all = take_all(&lane->ended);
    pthread_mutex_unlock(&lane->lock);
    for (Item *item; (item = take(&all)); free_item(item)) {
        lane->calls -= !item->result;
        PyObject *result = item->result ? Py_NewRef(item->result) : PyLong_FromLong(item->outcome);
        if (result && results && PyList_Append(results, result))
            Py_CLEAR(results);
        Py_XDECREF(result);
    }
    if (!lane->calls) {
        /* The thread has none of them any more, so nothing is begun that was added behind a failure. */
        pthread_mutex_lock(&lane->lock);
        lane->failed = false;
        pthread_mutex_unlock(&lane->lock);
    }
    return results;
}

static PyObject *lane_fileno(Lane *lane, PyObject *ignored) {
    (void)ignored;
    return PyLong_FromLong(lane->event);
}

static PyObject *lane_close(Lane *lane, PyObject *ignored) {
    (void)ignored;
    if (lane->event >= 0)
        close(lane->event);
    lane->event = -1;
    Py_RETURN_NONE;
}

static PyObject *lane_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
    (void)names;
    if (!want_arguments("lane", PyTuple_Size(arguments), 0))
        return NULL;
    Lane *lane = (Lane *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (!lane)
        return NULL;
    pthread_mutex_init(&lane->lock, NULL);
    sem_init(&lane->asked, 0, 0);
    lane->event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (lane->event < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_CLEAR(lane);
    }
    return (PyObject *)lane;
}

/* No thread is in `wait`, which holds the object. In a child of a fork that thread is gone, and nothing here waits for
   it. */
static void lane_free(Lane *lane) {
    PyTypeObject *type = Py_TYPE((PyObject *)lane);
    for (Item *item; (item = take(&lane->added)) || (item = take(&lane->ended));)
        free_item(item);
    if (lane->event >= 0)
        close(lane->event);
    sem_destroy(&lane->asked);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(lane);
    Py_DECREF(type);
}

#define METHOD(name, flags) {#name, (PyCFunction)(void (*)(void))lane_##name, flags, NULL}

static PyMethodDef methods[] = {
    METHOD(wait, METH_NOARGS),  METHOD(signal, METH_NOARGS), METHOD(stop, METH_NOARGS),   METHOD(end, METH_O),
    METHOD(add, METH_FASTCALL), METHOD(ended, METH_NOARGS),  METHOD(fileno, METH_NOARGS), METHOD(close, METH_NOARGS),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, lane_new}, {Py_tp_dealloc, lane_free}, {Py_tp_methods, methods}, {0, NULL}};

static PyType_Spec spec = {.name = "delayd_kernel.lane",
                           .basicsize = sizeof(Lane),
                           .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
                           .slots = slots};

int add_lane(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    int failed = type ? PyModule_AddObjectRef(module, "lane", type) : -1;
    Py_XDECREF(type);
    return failed;
}
