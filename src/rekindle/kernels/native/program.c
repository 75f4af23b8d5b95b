#include "program.h"

void program_run(const KernelCall *calls, int64_t count) {
    for (int64_t n = 0; n < count; n++) calls[n].run(calls[n].words);
}
