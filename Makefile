# millrace: `make help` lists the targets.
SHELL := /bin/bash
BUILD ?= build
CC ?= gcc
PREFIX ?= /usr/local
VERSION := $(shell cat VERSION)
MODE ?= release

CSTD := -std=c11 -D_GNU_SOURCE
WARN := -Wall -Wextra -Werror -Wshadow -Wpointer-arith -Wstrict-prototypes -Wmissing-prototypes -Wvla -Wno-unknown-warning-option
OPT_release := -O2 -g
OPT_asan := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
OPT_tsan := -O1 -g -fsanitize=thread
DEFS := -DMR_VERSION='"$(VERSION)"'
CFLAGS += $(CSTD) $(WARN) $(OPT_$(MODE)) -march=x86-64-v2 -ffp-contract=off -fno-math-errno -pthread -I. $(DEFS) -MMD -MP
LDLIBS := -lzstd -larchive -ljansson -lpcre2-8 -lutf8proc -lxxhash -lm -ldl -pthread
AVX2_FLAGS := -mavx2 -mfma -mf16c -mbmi2
AVX512_FLAGS := $(AVX2_FLAGS) -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni

LIB_SRC := $(wildcard io/*.c kernels/*.c kernels/*/*.c src/*.c) $(filter-out jobs/main.c,$(wildcard jobs/*.c))
LIB_OBJ := $(LIB_SRC:%.c=$(BUILD)/%.o)
LIB := $(BUILD)/libmillrace.a
BIN := $(BUILD)/millrace
TESTS := $(patsubst tests/unit/%.c,$(BUILD)/tests/%,$(wildcard tests/unit/test_*.c))

.DEFAULT_GOAL := all
.PHONY: all
all: deps-check ## build the program: build/millrace
	@$(MAKE) --no-print-directory $(BIN)

$(BUILD)/kernels/avx2/%.o: CFLAGS += $(AVX2_FLAGS)
$(BUILD)/kernels/avx512/%.o: CFLAGS += $(AVX512_FLAGS)

$(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -c -o $@ $<

$(LIB): $(LIB_OBJ)
	@rm -f $@
	ar rcs $@ $^

$(BIN): $(BUILD)/jobs/main.o $(LIB)
	$(CC) $(CFLAGS) -o $@ $^ $(LDFLAGS) $(LDLIBS)

$(BUILD)/tests/%: tests/unit/%.c $(LIB)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -o $@ $< $(LIB) $(LDFLAGS) -lcmocka $(LDLIBS)

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
