// Plain job structs as Python classes: numbers are fields, pointers are integers.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "bind_ticket.h"

namespace coattn {

template <class Job, class T>
void field(nanobind::class_<Job>& c, const char* name, T Job::* member) {
  if constexpr (std::is_pointer_v<T>) {
    c.def_prop_rw(
        name, [member](const Job& job) { return reinterpret_cast<uintptr_t>(job.*member); },
        [member](Job& job, uintptr_t value) { job.*member = reinterpret_cast<T>(value); });
  } else if constexpr (std::is_enum_v<T>) {
    c.def_prop_rw(
        name, [member](const Job& job) { return static_cast<int>(job.*member); },
        [member](Job& job, int value) { job.*member = static_cast<T>(value); });
  } else {
    c.def_rw(name, member);
  }
}

// name(job) runs on the calling thread and the pool; submit_name(job) returns a Ticket. Both without the GIL.
template <class Job>
void runnable(nanobind::module_& m, const char* name, const char* submit_name,
              void (*run)(const Job&, WorkerPool&)) {
  m.def(
      name, [run](const Job& job) { run(job, runtime()->pool); },
      nanobind::call_guard<nanobind::gil_scoped_release>());
  m.def(
      submit_name, [run](const Job& job) { return submit(job, run); },
      nanobind::call_guard<nanobind::gil_scoped_release>());
}

}  // namespace coattn
