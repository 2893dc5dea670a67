/* A kernel's call from Python, without Python in between: the base of the class of kernels, where it can be built.
 *
 * A call goes by the route that routes.py laid for its way of writing: in the list `by_count`, where all arguments go
 * by position; else in the dict `by_names`, whose keys are the keywords' names as they are written, which Python passes
 * as one tuple. A call that has no route, or that its table answers with a miss, goes to the method `_call`.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#define MISS (-1)

/* A route, as routes.py lays it: a table's function and its finish; the place that they serve; which of a call's
 * arguments the output is like that the function takes behind them, or None; torch.empty_like; torch.Tensor. */
enum { FUNCTION, FINISH, PLACE, LIKE, EMPTY_LIKE, TENSOR, ROUTE_SIZE };
/* A fork, where some keywords give axes: which of the call's values those are, which the others, and the routes by the
 * axes' values. */
enum { AXES, OTHERS, BY_AXES, FORK_SIZE };
/* The place of such a route: the way of writing, the axes' values, then from here their types. */
enum { TYPES = 2 };

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* by_count;
  PyObject* by_names;
} Caller;

/* What a list holds there, as a new reference; NULL, and no error, where that is neither a route nor a fork. */
static PyObject* listed(PyObject* list, Py_ssize_t at) {
  if (!list || !PyList_CheckExact(list) || at >= PyList_GET_SIZE(list)) return NULL;
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = PyList_GetItemRef(list, at);
#else
  PyObject* found = PyList_GET_ITEM(list, at);
  Py_INCREF(found);
#endif
  if (found && PyTuple_CheckExact(found)) return found;
  Py_XDECREF(found);
  PyErr_Clear();
  return NULL;
}

/* Of an error Python is asked again, and says so. Ctrl-C stays: it comes once. */
static void forget_error(void) {
  if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
}

/* What a dict holds for a key, as a new reference; NULL where that is nothing, or the key is none; with an error only
 * for Ctrl-C. A key's own Python may run, which may take the dict away. */
static PyObject* looked_up(PyObject* dict, PyObject* key) {
  if (!dict || !PyDict_CheckExact(dict)) return NULL;
  PyObject* found;
  Py_INCREF(dict);
#if PY_VERSION_HEX >= 0x030D0000
  PyDict_GetItemRef(dict, key, &found);
#else
  found = PyDict_GetItemWithError(dict, key);
  Py_XINCREF(found);
#endif
  if (!found) forget_error();
  Py_DECREF(dict);
  return found;
}

/* A tuple of the values at `places` (bytes); of the first `count` where that is NULL. */
static PyObject* picked(PyObject* const* values, PyObject* places, Py_ssize_t count) {
  const unsigned char* place = places ? (const unsigned char*)PyBytes_AS_STRING(places) : NULL;
  PyObject* tuple = PyTuple_New(places ? PyBytes_GET_SIZE(places) : count);
  for (Py_ssize_t at = 0; tuple && at < PyTuple_GET_SIZE(tuple); ++at) {
    PyObject* value = values[place ? place[at] : at];
    Py_INCREF(value);
    PyTuple_SET_ITEM(tuple, at, value);
  }
  return tuple;
}

/* The route for these values of the axes. The dict takes True for 1, so that their types are compared too. */
static PyObject* branch_of(PyObject* fork, PyObject* const* values) {
  PyObject* axes = picked(values, PyTuple_GET_ITEM(fork, AXES), 0);
  PyObject* route = axes ? looked_up(PyTuple_GET_ITEM(fork, BY_AXES), axes) : NULL;
  for (Py_ssize_t at = 0; route && at < PyTuple_GET_SIZE(axes); ++at) {
    PyObject* type = PyTuple_GET_ITEM(PyTuple_GET_ITEM(route, PLACE), TYPES + at);
    if (type != (PyObject*)Py_TYPE(PyTuple_GET_ITEM(axes, at))) Py_CLEAR(route);
  }
  Py_XDECREF(axes);
  return route;
}

/* The route of a call and, in `arguments`, what its table takes; NULL where there is none; with an error for Ctrl-C. */
static PyObject* route_of(Caller* self, PyObject* const* values, Py_ssize_t count, PyObject* names,
                          PyObject** arguments) {
  Py_ssize_t named = names ? PyTuple_GET_SIZE(names) : 0;
  PyObject* list = named ? looked_up(self->by_names, names) : self->by_count;
  PyObject* route = listed(list, count);
  if (named) Py_XDECREF(list);
  if (!route) return NULL;
  if (PyTuple_GET_SIZE(route) == FORK_SIZE) {
    PyObject* fork = route;
    route = branch_of(fork, values);
    *arguments = route ? picked(values, PyTuple_GET_ITEM(fork, OTHERS), 0) : NULL;
    Py_DECREF(fork);
  } else if (PyTuple_GET_SIZE(route) == ROUTE_SIZE) {
    *arguments = picked(values, NULL, count + named);
  }
  if (!*arguments) {
    forget_error();
    Py_CLEAR(route);
  }
  return route;
}

/* After a call that raised: `_explain` raises what says more; if it does not, what was raised stays. Ctrl-C does. */
static void explain(PyObject* self, PyObject* place, PyObject* arguments) {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback) PyException_SetTraceback(value, traceback);
  PyObject* done = PyObject_CallMethod(self, "_explain", "OOO", place, arguments, value);
  if (done) {
    Py_DECREF(done);
    PyErr_Restore(type, value, traceback);
  } else {
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
  }
}

static PyObject* in_python(PyObject* self, PyObject* const* values, size_t flags, PyObject* names) {
  PyObject* method = PyObject_GetAttrString(self, "_call");
  if (!method) return NULL;
  PyObject* result = PyObject_Vectorcall(method, values, flags, names);
  Py_DECREF(method);
  return result;
}

/* Whether all arguments are what calls are made of. Of any others Python sees to it that none is a tensor of another
 * library, which the table's function would take; and torch.empty_like makes plain tensors of plain ones alone. */
static int are_served_natively(PyObject* arguments, PyObject* route) {
  PyObject* like = PyTuple_GET_ITEM(route, LIKE);
  PyTypeObject* tensor = (PyTypeObject*)PyTuple_GET_ITEM(route, TENSOR);
  for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(arguments); ++at) {
    PyObject* value = PyTuple_GET_ITEM(arguments, at);
    if (Py_TYPE(value) != tensor && value != Py_None && !PyFloat_CheckExact(value) && !PyLong_CheckExact(value) &&
        !PyType_IsSubtype(Py_TYPE(value), tensor))
      return 0;
  }
  return like == Py_None || Py_TYPE(PyTuple_GET_ITEM(arguments, PyLong_AsSsize_t(like))) == tensor;
}

/* The arguments and behind them a new output; NULL with an error where that can't be had. */
static PyObject* with_output(PyObject* arguments, PyObject* route) {
  PyObject* like = PyTuple_GET_ITEM(arguments, PyLong_AsSsize_t(PyTuple_GET_ITEM(route, LIKE)));
  PyObject* output = PyObject_CallOneArg(PyTuple_GET_ITEM(route, EMPTY_LIKE), like);
  Py_ssize_t count = PyTuple_GET_SIZE(arguments);
  PyObject* all = output ? PyTuple_New(count + 1) : NULL;
  for (Py_ssize_t at = 0; all && at <= count; ++at) {
    PyObject* value = at < count ? PyTuple_GET_ITEM(arguments, at) : output;
    Py_INCREF(value);
    PyTuple_SET_ITEM(all, at, value);
  }
  Py_XDECREF(output);
  return all;
}

/* What a call returns; NULL with an error; or `*missed`, where its table does not know it. */
static PyObject* carry_out(PyObject* arguments, PyObject* route, int* missed) {
  PyObject* all = PyTuple_GET_ITEM(route, LIKE) == Py_None ? Py_NewRef(arguments) : with_output(arguments, route);
  PyObject* result = all ? PyObject_Call(PyTuple_GET_ITEM(route, FUNCTION), all, NULL) : NULL;
  if (result && PyLong_CheckExact(result)) {
    PyObject* answered = result;
    long answer = PyLong_AsLong(answered);
    *missed = answer == MISS || answer >= PyTuple_GET_SIZE(all);
    if (answer < MISS)
      result = PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(route, FINISH), answered, arguments, NULL);
    else
      result = *missed ? NULL : Py_NewRef(PyTuple_GET_ITEM(all, answer));
    Py_DECREF(answered);
  }
  Py_XDECREF(all);
  return result;
}

static PyObject* call(PyObject* self, PyObject* const* values, size_t flags, PyObject* names) {
  PyObject *arguments = NULL, *result = NULL;
  PyObject* route = route_of((Caller*)self, values, PyVectorcall_NARGS(flags), names, &arguments);
  if (!route && PyErr_Occurred()) return NULL;
  int missed = !route || !are_served_natively(arguments, route);
  if (!missed) {
    result = carry_out(arguments, route, &missed);
    if (!result && !missed) explain(self, PyTuple_GET_ITEM(route, PLACE), arguments);
  }
  Py_XDECREF(arguments);
  Py_XDECREF(route);
  return missed ? in_python(self, values, flags, names) : result;
}

static PyObject* new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self) ((Caller*)self)->vectorcall = call;
  return self;
}

#if PY_VERSION_HEX < 0x030C0000
/* What later versions do for every class by themselves: one that is called as its base is, is called as quickly. */
static PyObject* init_subclass(PyObject* type, PyObject* nothing) {
  if (((PyTypeObject*)type)->tp_call == PyVectorcall_Call) ((PyTypeObject*)type)->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
  Py_RETURN_NONE;
}
#endif

static int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(((Caller*)self)->by_count);
  Py_VISIT(((Caller*)self)->by_names);
  return 0;
}

static int clear(PyObject* self) {
  Py_CLEAR(((Caller*)self)->by_count);
  Py_CLEAR(((Caller*)self)->by_names);
  return 0;
}

static void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyMethodDef methods[] = {
#if PY_VERSION_HEX < 0x030C0000
    {"__init_subclass__", init_subclass, METH_NOARGS | METH_CLASS, NULL},
#endif
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Caller, vectorcall), READONLY, NULL},
    {"by_count", T_OBJECT_EX, offsetof(Caller, by_count), 0, "routes, by the number of arguments"},
    {"by_names", T_OBJECT_EX, offsetof(Caller, by_names), 0, "lists of routes and forks, by the keywords' names"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, new},           {Py_tp_call, PyVectorcall_Call}, {Py_tp_traverse, traverse}, {Py_tp_clear, clear},
    {Py_tp_dealloc, dealloc},   {Py_tp_methods, methods},        {Py_tp_members, members},   {0, NULL},
};

static PyType_Spec spec = {
    "tunekit_caller.Caller",
    sizeof(Caller),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    slots,
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
