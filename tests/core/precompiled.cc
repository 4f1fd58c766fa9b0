// The object that belongs to precompiled.h: its flags are those of every test that uses it.
#include "precompiled.h"
