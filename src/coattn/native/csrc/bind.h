// The pieces of the extension module, one file each.
#pragma once

#include <nanobind/nanobind.h>

namespace coattn {

void bind_arena(nanobind::module_& m);
void bind_attend(nanobind::module_& m);
void bind_entries(nanobind::module_& m);
void bind_features(nanobind::module_& m);
void bind_layout(nanobind::module_& m);
void bind_limits(nanobind::module_& m);
void bind_mailbox(nanobind::module_& m);
void bind_pool(nanobind::module_& m);

}  // namespace coattn
