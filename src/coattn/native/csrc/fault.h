// Faults that tests put into the CPU side, where a real one would strike.
#pragma once

#include <string>

namespace coattn {

// For tests: what happens to the next job of a mailbox or of the asynchronous queue. "stall" sleeps for
// `seconds` first, "die" ends the thread without a reply, "throw" fails the job, "odd" throws
// what is no std::exception, "" is no fault.
void inject_fault(const std::string& kind, double seconds);

enum class Fault { none, die };
// Called by servers before a job: sleeps or throws as injected, or asks the thread to die. Takes the fault.
Fault take_fault();

}  // namespace coattn
