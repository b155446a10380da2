// coattn._native: raw pointers and plain numbers in, plain numbers out. coattn/native is the typed face of
// it.
#include "bind.h"

#include <exception>

#include "errors.h"
#include "source_hash.h"

namespace nb = nanobind;

namespace {

// Set by coattn.native at import: the Python class built from (sentence, hint). Borrowed from the module for
// its life.
PyObject* error_type = nullptr;

void translate(const std::exception_ptr& p, void*) {
  try {
    std::rethrow_exception(p);
  } catch (const coattn::Refusal& refusal) {
    nb::object args = nb::make_tuple(refusal.sentence.c_str(), refusal.hint.c_str());
    PyErr_SetObject(error_type ? error_type : PyExc_RuntimeError, args.ptr());
  }
}

}  // namespace

NB_MODULE(_native, m) {
  // Memory that a lost worker may still touch is kept on purpose, so at exit something may be left.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(translate, nullptr);
  m.attr("source_hash") = COATTN_SOURCE_HASH;
  m.def("set_error_type", [](nb::object type) {
    Py_XDECREF(error_type);
    error_type = type.release().ptr();
  });
  coattn::bind_arena(m);
  coattn::bind_attend(m);
  coattn::bind_entries(m);
  coattn::bind_features(m);
  coattn::bind_layout(m);
  coattn::bind_limits(m);
  coattn::bind_mailbox(m);
  coattn::bind_pool(m);
}
