/* The hot path: from the arguments of a call, as TVM-FFI hands them on, to the kernel that serves them.
 *
 * A table is a TVM-FFI function. Called with a kernel's arguments it makes a key of what is fixed about them
 * (shapes, dtypes, device, the types of numbers), finds the entry of that key and carries out its recipe. A call
 * that it does not know, or that holds anything but contiguous, aligned tensors and numbers, answers MISS.
 *
 * Entries are only ever added, each published by one atomic store, so that readers take no lock; who adds holds
 * one (in Python). A table never grows: a larger one replaces it, and it is freed when its last caller is gone.
 */
#include <float.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#define EXPORT __attribute__((visibility("default")))
#define MOST_ARGUMENTS 64
#define MOST_WORDS 512
#define ALIGNMENT_BYTES 16
#define MISS (-1)

/* What an argument of the kernel is made of. */
enum { GIVEN = 0, GIVEN_AS_FLOAT = 1, INTEGER = 2, FLOATING = 3, WORKSPACE = 4 };

/* As `entries.py` packs it: one per argument. */
typedef struct {
  int32_t kind;
  int32_t place; /* GIVEN: of the call's arguments */
  union {
    int64_t integer; /* WORKSPACE: its float32 elements */
    double floating;
  } of;
} Step;

typedef struct {
  uint64_t hash;
  uint64_t* key;
  int32_t words;
  int32_t steps;
  int64_t at; /* of the table's entries */
  int64_t answer; /* returned in place of the output */
  TVMFFIObjectHandle kernel; /* NULL: the caller carries the call out */
  Step* recipe;
  _Atomic int64_t calls;
} Entry;

typedef struct {
  uint64_t mask;
  uint64_t positive; /* a bit for each value of a call that must be above 0, if it is a number */
  int64_t count;
  Entry** entries; /* by the order in which they were added */
  _Atomic(Entry*) slots[];
} Table;

static void answer(TVMFFIAny* result, int64_t value) {
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = value;
}

static int fail(const char* kind, const char* words) {
  TVMFFIErrorSetRaisedFromCStr(kind, words);
  return -1;
}

/* What an object holds lies behind its header. */
static const void* body_of(const TVMFFIAny* argument) { return (const char*)argument->v_obj + sizeof(TVMFFIObject); }

static const DLTensor* tensor_of(const TVMFFIAny* argument) {
  if (argument->type_index == kTVMFFIDLTensorPtr) return (const DLTensor*)argument->v_ptr;
  if (argument->type_index == kTVMFFITensor) return body_of(argument);
  return NULL;
}

/* Whether a tensor lies in memory as every artifact takes it. What only stands for other tensors (a wrapper, a fake, a
 * freed storage) comes with a null pointer. */
static int is_plain(const DLTensor* tensor) {
  int64_t stride = 1;
  for (int dim = tensor->ndim - 1; tensor->strides && dim >= 0; --dim) {
    if (tensor->shape[dim] != 1 && tensor->strides[dim] != stride) return 0;
    stride *= tensor->shape[dim];
  }
  return tensor->data && ((uintptr_t)tensor->data + tensor->byte_offset) % ALIGNMENT_BYTES == 0;
}

/* is_positive of spec/arguments.py. */
static uint64_t is_positive(const TVMFFIAny* number) {
  if (number->type_index == kTVMFFIFloat) return number->v_float64 >= FLT_MIN && number->v_float64 <= FLT_MAX;
  return number->type_index == kTVMFFIInt && number->v_int64 > 0;
}

/* The key of a call: its number of words, or MISS. A number that must be `positive` and is not makes a key of its own,
 * which never gets an entry: Python refuses the call. */
static int key_of(const TVMFFIAny* arguments, int32_t count, uint64_t positive, uint64_t* words) {
  int length = 0;
  if (count > MOST_ARGUMENTS) return MISS;
  for (int32_t at = 0; at < count; ++at) {
    const DLTensor* tensor = tensor_of(&arguments[at]);
    if (tensor) {
      if (length + 2 + tensor->ndim > MOST_WORDS || !is_plain(tensor)) return MISS;
      words[length++] = (uint64_t)kTVMFFITensor << 48 | (uint64_t)tensor->ndim << 40 |
                        (uint64_t)tensor->dtype.code << 32 | (uint64_t)tensor->dtype.bits << 16 | tensor->dtype.lanes;
      words[length++] = (uint64_t)tensor->device.device_type << 32 | (uint32_t)tensor->device.device_id;
      for (int dim = 0; dim < tensor->ndim; ++dim) words[length++] = (uint64_t)tensor->shape[dim];
    } else {
      int32_t type = arguments[at].type_index;
      if (length + 1 > MOST_WORDS || (type != kTVMFFINone && type != kTVMFFIInt && type != kTVMFFIFloat)) return MISS;
      words[length++] = (uint64_t)type << 48 | (positive >> at & 1 && is_positive(&arguments[at]));
    }
  }
  return length;
}

static uint64_t hash_of(const uint64_t* words, int length) {
  uint64_t hash = 0x9e3779b97f4a7c15u;
  for (int at = 0; at < length; ++at) {
    hash = (hash ^ words[at]) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 32;
  }
  return hash;
}

static Entry* find(Table* table, const uint64_t* words, int length, uint64_t hash, uint64_t* slot) {
  for (*slot = hash & table->mask;; *slot = (*slot + 1) & table->mask) {
    Entry* entry = atomic_load_explicit(&table->slots[*slot], memory_order_acquire);
    if (!entry) return NULL;
    if (entry->hash == hash && entry->words == length && !memcmp(entry->key, words, length * sizeof *words))
      return entry;
  }
}

/* So many float32 elements on the device of `like`, by the allocator of the framework that the call came from; NULL
 * where that has no memory, or makes none now but tensors that only stand for others. */
static TVMFFIObjectHandle allocated(int64_t elements, const DLTensor* like) {
  DLTensor wanted = {NULL, like->device, 1, {kDLFloat, 32, 1}, &elements, NULL, 0};
  TVMFFIObjectHandle made = NULL, error = NULL;
  if (TVMFFIEnvTensorAlloc(&wanted, &made)) {
    TVMFFIErrorMoveFromRaised(&error);
    if (error) TVMFFIObjectDecRef(error);
    return NULL;
  }
  TVMFFIAny tensor = {.type_index = kTVMFFITensor, .v_obj = made};
  if (tensor_of(&tensor)->data) return made;
  TVMFFIObjectDecRef(made);
  return NULL;
}

/* Runs an entry's kernel; a MISS where its workspace can't be had: Python is asked for it again, and says why. */
static int carry_out(const Entry* entry, const TVMFFIAny* given, int32_t count, TVMFFIAny* result) {
  TVMFFIAny arguments[MOST_ARGUMENTS];
  TVMFFIObjectHandle workspace = NULL;
  const DLTensor* like = NULL;
  for (int32_t at = 0; at < count && !like; ++at) like = tensor_of(&given[at]);
  for (int32_t at = 0; at < entry->steps; ++at) {
    const Step* step = &entry->recipe[at];
    TVMFFIAny* argument = &arguments[at];
    argument->zero_padding = 0;
    switch (step->kind) {
      case GIVEN:
        *argument = given[step->place];
        break;
      case GIVEN_AS_FLOAT:
        argument->type_index = kTVMFFIFloat;
        argument->v_float64 = (double)given[step->place].v_int64;
        break;
      case INTEGER:
        argument->type_index = kTVMFFIInt;
        argument->v_int64 = step->of.integer;
        break;
      case FLOATING:
        argument->type_index = kTVMFFIFloat;
        argument->v_float64 = step->of.floating;
        break;
      default:
        workspace = allocated(step->of.integer, like);
        if (!workspace) {
          answer(result, MISS);
          return 0;
        }
        argument->type_index = kTVMFFITensor;
        argument->v_obj = workspace;
    }
  }
  TVMFFIAny nothing = {.type_index = kTVMFFINone};
  int status = TVMFFIFunctionCall(entry->kernel, arguments, entry->steps, &nothing);
  if (!status && nothing.type_index >= kTVMFFIStaticObjectBegin) TVMFFIObjectDecRef(nothing.v_obj);
  if (workspace) TVMFFIObjectDecRef(workspace);
  if (!status) answer(result, entry->answer);
  return status;
}

static int call(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
  uint64_t words[MOST_WORDS], slot;
  int length = key_of(arguments, count, ((Table*)self)->positive, words);
  Entry* entry = length < 0 ? NULL : find(self, words, length, hash_of(words, length), &slot);
  if (!entry) {
    answer(result, MISS);
    return 0;
  }
  atomic_fetch_add_explicit(&entry->calls, 1, memory_order_relaxed);
  if (entry->kernel) return carry_out(entry, arguments, count, result);
  answer(result, entry->answer);
  return 0;
}

static void release(void* self) {
  Table* table = self;
  for (int64_t at = 0; at < table->count; ++at) {
    Entry* entry = table->entries[at];
    if (entry->kernel) TVMFFIObjectDecRef(entry->kernel);
    free(entry->key);
    free(entry->recipe);
    free(entry);
  }
  free(table->entries);
  free(table);
}

/* What a Python bytes object arrives as. */
static int bytes_of(const TVMFFIAny* argument, const char** data, size_t* size) {
  if (argument->type_index == kTVMFFIByteArrayPtr) {
    const TVMFFIByteArray* array = argument->v_ptr;
    *data = array->data;
    *size = array->size;
  } else if (argument->type_index == kTVMFFIBytes) {
    const TVMFFIByteArray* array = body_of(argument);
    *data = array->data;
    *size = array->size;
  } else if (argument->type_index == kTVMFFISmallBytes) {
    *data = argument->v_bytes;
    *size = argument->small_str_len;
  } else {
    return fail("TypeError", "bytes wanted");
  }
  return 0;
}

/* make(capacity, positive) -> handle: a table for fewer entries than `capacity`, a power of two. */
EXPORT int __tvm_ffi_make(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
  if (count != 2 || arguments[0].type_index != kTVMFFIInt || arguments[1].type_index != kTVMFFIInt)
    return fail("TypeError", "make(capacity, positive)");
  uint64_t capacity = (uint64_t)arguments[0].v_int64;
  if (!capacity || capacity & (capacity - 1)) return fail("ValueError", "the capacity is no power of two");
  Table* table = calloc(1, sizeof(Table) + capacity * sizeof(table->slots[0]));
  Entry** entries = calloc(capacity, sizeof *entries);
  if (!table || !entries) {
    free(table);
    free(entries);
    return fail("MemoryError", "no memory for a dispatch table");
  }
  table->mask = capacity - 1;
  table->positive = (uint64_t)arguments[1].v_int64;
  table->entries = entries;
  answer(result, (int64_t)(intptr_t)table);
  return 0;
}

/* function(handle) -> the table as a function, which owns it: once a table. */
EXPORT int __tvm_ffi_function(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
  if (count != 1 || arguments[0].type_index != kTVMFFIInt) return fail("TypeError", "function(handle)");
  TVMFFIObjectHandle made = NULL;
  int status = TVMFFIFunctionCreate((void*)(intptr_t)arguments[0].v_int64, call, release, &made);
  if (status) return status;
  result->type_index = kTVMFFIFunction;
  result->zero_padding = 0;
  result->v_obj = made;
  return 0;
}

/* key(positive, *arguments) -> the key of a call as bytes; None for one that no table serves. */
EXPORT int __tvm_ffi_key(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
  if (count < 1 || arguments[0].type_index != kTVMFFIInt) return fail("TypeError", "key(positive, *arguments)");
  uint64_t words[MOST_WORDS];
  int length = key_of(arguments + 1, count - 1, (uint64_t)arguments[0].v_int64, words);
  result->type_index = kTVMFFINone;
  result->zero_padding = 0;
  result->v_int64 = 0;
  if (length < 0) return 0;
  TVMFFIByteArray bytes = {(const char*)words, length * sizeof *words};
  return TVMFFIBytesFromByteArray(&bytes, result);
}

/* put(handle, key, kernel or None, recipe, answer) -> the entry that serves calls of `key`: the one that the
 * table has, else a new one; MISS where it is full. */
EXPORT int __tvm_ffi_put(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
  const char *key, *recipe;
  size_t key_size, recipe_size;
  if (count != 5 || arguments[0].type_index != kTVMFFIInt || arguments[4].type_index != kTVMFFIInt)
    return fail("TypeError", "put(handle, key, kernel, recipe, answer)");
  if (bytes_of(&arguments[1], &key, &key_size) || bytes_of(&arguments[3], &recipe, &recipe_size)) return -1;
  Table* table = (Table*)(intptr_t)arguments[0].v_int64;
  size_t steps = recipe_size / sizeof(Step);
  if (steps > MOST_ARGUMENTS || recipe_size % sizeof(Step) || key_size > MOST_WORDS * sizeof(uint64_t))
    return fail("ValueError", "a recipe or a key is too long");
  uint64_t words[MOST_WORDS], slot;
  int32_t length = (int32_t)(key_size / sizeof *words);
  memcpy(words, key, key_size);
  uint64_t hash = hash_of(words, length);
  Entry* known = find(table, words, length, hash, &slot);
  if (known || (uint64_t)table->count >= table->mask) {
    answer(result, known ? known->at : MISS);
    return 0;
  }
  Entry* entry = calloc(1, sizeof *entry);
  uint64_t* kept = malloc(key_size + 1);
  Step* copied = malloc(recipe_size + 1);
  if (!entry || !kept || !copied) {
    free(entry);
    free(kept);
    free(copied);
    return fail("MemoryError", "no memory for a dispatch entry");
  }
  memcpy(kept, words, key_size);
  memcpy(copied, recipe, recipe_size);
  entry->key = kept;
  entry->words = length;
  entry->hash = hash;
  entry->at = table->count;
  entry->recipe = copied;
  entry->steps = (int32_t)steps;
  entry->answer = arguments[4].v_int64;
  if (arguments[2].type_index == kTVMFFIFunction) {
    entry->kernel = arguments[2].v_obj;
    TVMFFIObjectIncRef(entry->kernel);
  }
  table->entries[table->count++] = entry;
  atomic_store_explicit(&table->slots[slot], entry, memory_order_release);
  answer(result, entry->at);
  return 0;
}

/* calls(handle, entry) -> how often it was called. */
EXPORT int __tvm_ffi_calls(void* self, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {
  if (count != 2 || arguments[0].type_index != kTVMFFIInt || arguments[1].type_index != kTVMFFIInt)
    return fail("TypeError", "calls(handle, entry)");
  Table* table = (Table*)(intptr_t)arguments[0].v_int64;
  int64_t at = arguments[1].v_int64;
  if (at < 0 || at >= table->count) return fail("IndexError", "no such entry");
  answer(result, atomic_load_explicit(&table->entries[at]->calls, memory_order_relaxed));
  return 0;
}
