/* A kernel's call from Python, without Python in between: the base of the class of kernels, where it can be built.
 *
 * `functions` is a list: at n, for calls of n arguments by position, the function and the finish of their table (see
 * tables.py), or None. All else (keywords, a miss, other numbers of arguments) goes to the method `_call`.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#define MISS (-1)

typedef struct {
  PyObject_HEAD
  PyObject* functions;
} Caller;

static PyObject* table_of(Caller* self, Py_ssize_t count) {
  PyObject* functions = self->functions;
  if (!functions || !PyList_CheckExact(functions) || count >= PyList_GET_SIZE(functions)) return NULL;
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* table = PyList_GetItemRef(functions, count);
#else
  PyObject* table = PyList_GET_ITEM(functions, count);
  Py_INCREF(table);
#endif
  if (table && PyTuple_CheckExact(table) && PyTuple_GET_SIZE(table) == 2) return table;
  Py_XDECREF(table);
  PyErr_Clear();
  return NULL;
}

/* After a call that raised: `_explain` raises what says more; if it does not, what was raised stays. Ctrl-C does. */
static void explain(PyObject* self, PyObject* args) {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  PyObject* done = PyObject_CallMethod(self, "_explain", "nOO", PyTuple_GET_SIZE(args), args, value);
  if (done) {
    Py_DECREF(done);
    PyErr_Restore(type, value, traceback);
  } else {
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
  }
}

static PyObject* in_python(PyObject* self, PyObject* args, PyObject* keywords) {
  PyObject* method = PyObject_GetAttrString(self, "_call");
  if (!method) return NULL;
  PyObject* result = PyObject_Call(method, args, keywords);
  Py_DECREF(method);
  return result;
}

static PyObject* call(PyObject* self, PyObject* args, PyObject* keywords) {
  PyObject* table = NULL;
  if (!keywords || !PyDict_GET_SIZE(keywords)) table = table_of((Caller*)self, PyTuple_GET_SIZE(args));
  if (!table) return in_python(self, args, keywords);
  PyObject* result = PyObject_Call(PyTuple_GET_ITEM(table, 0), args, NULL);
  long answer = result && PyLong_CheckExact(result) ? PyLong_AsLong(result) : MISS;
  if (answer >= 0 && answer < PyTuple_GET_SIZE(args)) {
    Py_DECREF(result);
    result = PyTuple_GET_ITEM(args, answer);
    Py_INCREF(result);
  } else if (answer < MISS) {
    PyObject* rest = PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(table, 1), result, args, NULL);
    Py_DECREF(result);
    result = rest;
  } else if (result && PyLong_CheckExact(result)) {
    Py_DECREF(result);
    Py_DECREF(table);
    return in_python(self, args, NULL);
  }
  if (!result) explain(self, args);
  Py_DECREF(table);
  return result;
}

static int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(((Caller*)self)->functions);
  return 0;
}

static int clear(PyObject* self) {
  Py_CLEAR(((Caller*)self)->functions);
  return 0;
}

static void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyMemberDef members[] = {
    {"functions", T_OBJECT_EX, offsetof(Caller, functions), 0, "the tables' functions, by the number of arguments"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_call, call},         {Py_tp_traverse, traverse}, {Py_tp_clear, clear},
    {Py_tp_dealloc, dealloc},   {Py_tp_members, members},   {0, NULL},
};

static PyType_Spec spec = {
    "tunekit_caller.Caller", sizeof(Caller), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, slots,
};

static int fill(PyObject* module) {
  PyObject* type = PyType_FromSpec(&spec);
  if (!type) return -1;
  int status = PyModule_AddObject(module, "Caller", type);
  if (status) Py_DECREF(type);
  return status;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, fill},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "tunekit_caller", .m_slots = module_slots};

__attribute__((visibility("default"))) PyObject* PyInit_tunekit_caller(void) { return PyModuleDef_Init(&module); }
