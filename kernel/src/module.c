/* The module delayd_kernel: its pieces, and the number that delayd compares before it takes them. */

#include "kernel.h"

#define VERSION 3 /* Raised with each change of a piece; equal to delayd/kernel.py's. */

bool want_arguments(const char *name, Py_ssize_t got, Py_ssize_t wanted) {
    if (got == wanted)
        return true;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, wanted, got);
    return false;
}

#define PIECE(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}

static PyMethodDef pieces[] = {
    PIECE(message_rows), PIECE(lengths_of), PIECE(cut_items),  PIECE(items_fit),
    PIECE(pack_columns), PIECE(pick_rows),  {NULL, NULL, 0, NULL},
};

static int fill(PyObject *module) {
    make_factors();
    if (add_lane(module))
        return -1;
    return PyModule_AddIntConstant(module, "VERSION", VERSION);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, fill}, {0, NULL}};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "delayd_kernel",
    .m_doc = "Compiled pieces of delayd; delayd/kernel.py takes them.",
    .m_size = 0,
    .m_methods = pieces,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_delayd_kernel(void) { return PyModuleDef_Init(&definition); }
