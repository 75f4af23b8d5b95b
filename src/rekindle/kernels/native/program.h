/* A step as a list of calls, which `program_run` makes one after another: what Python called once, it need not call again.
Beside a kernel NAME that steps call stands NAME_call, which takes its arguments from words (program.py writes them). */

#ifndef PROGRAM_H
#define PROGRAM_H

#include <stdint.h>

typedef union {
    void *p;
    int64_t i;
    float f;
} Word;

enum { WORDS = 24 }; /* arguments at most */

typedef struct {
    void (*run)(const Word *words);
    Word words[WORDS];
} KernelCall;

#endif
