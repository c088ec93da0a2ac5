// A switch between two stacks, in user space. What a function call preserves is all that needs to
// be kept.
#pragma once

extern "C" void emulator_switch(void** save_stack, void* load_stack);
extern "C" void emulator_first_entry();

#if defined(__APPLE__)
#define ASM_NAME(name) "_" #name
#else
#define ASM_NAME(name) #name
#endif

#if defined(__x86_64__)
constexpr int kSavedWords = 7; // six registers and the return address

asm(".text\n"
    ".globl " ASM_NAME(emulator_switch) "\n" ASM_NAME(emulator_switch) ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    // A jump is predicted by where it went before, a return by calls that other stacks made.
    "  popq %rcx\n  jmpq *%rcx\n"
    // A new stack returns into here, with the function to run in rbx.
    ".globl " ASM_NAME(emulator_first_entry) "\n" ASM_NAME(emulator_first_entry) ":\n"
    "  xorl %ebp, %ebp\n"
    "  callq *%rbx\n"
    "  ud2\n");

// The frame that the first switch to a stack pops. `top` is aligned to 16 bytes, and so the stack
// is when it is gone.
inline void* prepare_stack(void** top, void (*entry)()) {
  void** stack = top - kSavedWords;
  for (int i = 0; i < kSavedWords; i++) stack[i] = nullptr;
  stack[4] = reinterpret_cast<void*>(entry); // rbx
  stack[6] = reinterpret_cast<void*>(&emulator_first_entry);
  return stack;
}
#elif defined(__aarch64__)
asm(".text\n"
    ".p2align 2\n"
    ".globl " ASM_NAME(emulator_switch) "\n" ASM_NAME(emulator_switch) ":\n"
    "  sub sp, sp, #160\n"
    "  stp x19, x20, [sp]\n  stp x21, x22, [sp, #16]\n"
    "  stp x23, x24, [sp, #32]\n  stp x25, x26, [sp, #48]\n"
    "  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n"
    "  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mov x2, sp\n  str x2, [x0]\n  mov sp, x1\n"
    "  ldp x19, x20, [sp]\n  ldp x21, x22, [sp, #16]\n"
    "  ldp x23, x24, [sp, #32]\n  ldp x25, x26, [sp, #48]\n"
    "  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n"
    "  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #160\n"
    "  ret\n"
    ".globl " ASM_NAME(emulator_first_entry) "\n" ASM_NAME(emulator_first_entry) ":\n"
    "  mov x29, #0\n"
    "  blr x19\n"
    "  brk #1\n");

inline void* prepare_stack(void** top, void (*entry)()) {
  void** stack = top - 20;
  for (int i = 0; i < 20; i++) stack[i] = nullptr;
  stack[0] = reinterpret_cast<void*>(entry);                  // x19
  stack[11] = reinterpret_cast<void*>(&emulator_first_entry); // x30
  return stack;
}
#else
#error "the Metal emulator switches stacks on x86-64 and on arm64 only"
#endif
