// What the fuzzer runs on each input. See open_store.cc.
#pragma once

#include "media.h"

namespace lightckpt::fuzz {

// Stops the process where an invariant breaks.
void run_input(Bytes input);

}  // namespace lightckpt::fuzz
