# millrace: `make help` lists the targets.
SHELL := /bin/bash
BUILD ?= build
CC ?= gcc
GXX ?= g++
PREFIX ?= /usr/local
VERSION := $(shell cat VERSION)
MODE ?= release

CSTD := -std=c11 -D_GNU_SOURCE
WARN := -Wall -Wextra -Werror -Wshadow -Wpointer-arith -Wstrict-prototypes -Wmissing-prototypes -Wvla -Wno-unknown-warning-option
OPT_release := -O2 -g
OPT_asan := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
OPT_fuzz := -O1 -g -fsanitize=address,undefined,fuzzer-no-link -fno-sanitize-recover=all -fno-omit-frame-pointer
OPT_tsan := -O1 -g -fsanitize=thread
DEFS := -DMR_VERSION='"$(VERSION)"'
CFLAGS += $(CSTD) $(WARN) $(OPT_$(MODE)) -march=x86-64-v2 -ffp-contract=off -fno-math-errno -pthread -I. $(DEFS) -MMD -MP
LDLIBS := -lzstd -larchive -lz -ljansson -lpcre2-8 -lutf8proc -lxxhash -lm -ldl -pthread
AVX2_FLAGS := -mavx2 -mfma -mf16c -mbmi2
AVX512_FLAGS := $(AVX2_FLAGS) -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mprfchw

LIB_SRC := $(wildcard io/*.c kernels/*.c kernels/*/*.c src/*.c) $(filter-out jobs/main.c,$(wildcard jobs/*.c))
# The GPU's kernels for the emulator, once a machine (kernels/gpu/mma.h).
EMU_OBJ := $(addprefix $(BUILD)/kernels/gpu/emu_,sync.o mfma.o wmma.o)
LIB_OBJ := $(LIB_SRC:%.c=$(BUILD)/%.o) $(EMU_OBJ)
LIB := $(BUILD)/libmillrace.a
BIN := $(BUILD)/millrace
FUZZERS := $(patsubst tests/fuzz/%.c,%,$(wildcard tests/fuzz/fuzz_*.c))
TESTS := $(patsubst tests/unit/%.c,$(BUILD)/tests/%,$(wildcard tests/unit/test_*.c))

.DEFAULT_GOAL := all
.PHONY: all
all: $(BIN) ## build the program: build/millrace

# Packages are looked for once a build folder.
$(BUILD)/.deps: scripts/setup.sh
	@mkdir -p $(@D)
	@scripts/setup.sh build --quiet
	@touch $@

$(BUILD)/kernels/avx2/%.o: CFLAGS += $(AVX2_FLAGS)
$(BUILD)/kernels/avx512/%.o: CFLAGS += $(AVX512_FLAGS)
ifeq ($(MODE),asan)
# clang 14 takes minutes over this one with both sanitizers on
$(BUILD)/kernels/avx512/avx512_amx.o: CFLAGS += -fno-sanitize=undefined
endif

ifeq ($(MODE),fuzz)
# no hostile input reaches them
$(BUILD)/kernels/%.o: CFLAGS += -fno-sanitize=address,undefined,fuzzer-no-link
endif

$(BUILD)/%.o: %.c | $(BUILD)/.deps
	@mkdir -p $(@D)
	@echo "  CC $<"
	@$(CC) $(CFLAGS) -c -o $@ $<

# Fibers change stacks under a sanitizer's feet, so these go without.
$(BUILD)/kernels/gpu/emu.o: CFLAGS += -fno-sanitize=all
GXXFLAGS := -x c++ -std=gnu++17 -O2 -g -march=x86-64-v2 -ffp-contract=off -fno-math-errno -fno-exceptions -fno-rtti -fPIC \
  -Wall -Wextra -Werror -Wno-psabi -I. -MMD -MP
$(BUILD)/kernels/gpu/emu_sync.o: MACHINE := MR_MMA_SYNC
$(BUILD)/kernels/gpu/emu_mfma.o: MACHINE := MR_MMA_MFMA
$(BUILD)/kernels/gpu/emu_wmma.o: MACHINE := MR_MMA_WMMA
$(EMU_OBJ): $(BUILD)/kernels/gpu/emu_%.o: kernels/gpu/all.cu | $(BUILD)/.deps
	@mkdir -p $(@D)
	@echo "  GXX $< ($*)"
	@$(GXX) $(GXXFLAGS) -DMR_MMA=$(MACHINE) -DMR_EMU_TABLE=mr_emu_$* -c -o $@ $<

# What `make gpu` has made is embedded.
BLOBS := $(wildcard $(BUILD)/gpu/*.fatbin $(BUILD)/gpu/*.hsaco)
$(BUILD)/kernels/gpu/blobs.o: $(BLOBS)
$(BUILD)/kernels/gpu/blobs.o: CFLAGS += $(foreach b,$(BLOBS),$(if $(filter %.fatbin,$b),-DMR_BLOB_CUDA='"$b"')) \
  $(foreach g,90a 942 1100,$(if $(filter %/gfx$g.hsaco,$(BLOBS)),-DMR_BLOB_GFX$(shell echo $g | tr a-z A-Z)='"$(BUILD)/gpu/gfx$g.hsaco"'))

$(LIB): $(LIB_OBJ)
	@rm -f $@
	@ar rcs $@ $^

$(BIN): $(BUILD)/jobs/main.o $(LIB)
	@echo "  LD $@"
	@$(CC) $(CFLAGS) -o $@ $^ $(LDFLAGS) $(LDLIBS)

# They are their own libraries.
$(BUILD)/tests/test_device_driver $(BUILD)/tests/test_device_gemm: CFLAGS += -rdynamic
$(BUILD)/tests/%: tests/unit/%.c $(LIB)
	@mkdir -p $(@D)
	@echo "  LD $@"
	@$(CC) $(CFLAGS) -o $@ $< $(LIB) $(LDFLAGS) -lcmocka $(LDLIBS)

# A fuzz target with libFuzzer (MODE=fuzz), or with a main that replays files.
$(BUILD)/fuzz_%: tests/fuzz/fuzz_%.c $(LIB)
	@echo "  LD $@"
	@$(CC) $(CFLAGS) -fsanitize=fuzzer -o $@ $< $(LIB) $(LDFLAGS) $(LDLIBS)
$(BUILD)/replay_%: tests/fuzz/fuzz_%.c tests/fuzz/replay.c $(LIB)
	@echo "  LD $@"
	@$(CC) $(CFLAGS) -o $@ $< tests/fuzz/replay.c $(LIB) $(LDFLAGS) $(LDLIBS)

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)

# ---------------------------------------------------------------- set-up
.PHONY: deps models model
deps: ## install what is missing (Debian packages; needs root or sudo)
	@scripts/setup.sh build

SMOLLM2 := models/SmolLM2-135M-Instruct.Q4_1.gguf
GEMMA3 := models/gemma-3-270m-q4_k_m.gguf

model: $(SMOLLM2) ## get the default model (98 MB)
models: $(SMOLLM2) $(GEMMA3) ## get both test models (350 MB)

$(SMOLLM2):
	@scripts/get-models.sh smollm2
$(GEMMA3):
	@scripts/get-models.sh gemma3

# ---------------------------------------------------------------- GPUs
# A cubin for each of NVIDIA's architectures in one fat binary, with PTX for those to come; a code object for each of
# AMD's, by plain clang without ROCm, or by ROCm's own (what hipcc calls). Every kernel is held to its budget (kernels/gpu/budget.txt).
NVCC ?= $(shell command -v nvcc)
AMD_CLANG ?= $(firstword $(shell command -v clang-19) $(wildcard /opt/rocm/llvm/bin/clang))
NV_ARCHS := sm_80 sm_90a sm_100
AMD_ARCHS := gfx90a gfx942 gfx1100
GPU_SRC := $(wildcard kernels/gpu/*.cu kernels/gpu/*.h)
FATBIN := $(BUILD)/gpu/cuda-sm_80-sm_90a-sm_100.fatbin
GPU_FILES := $(if $(NVCC),$(FATBIN)) $(if $(AMD_CLANG),$(AMD_ARCHS:%=$(BUILD)/gpu/%.hsaco))

.PHONY: gpu
gpu: ## kernels for NVIDIA (nvcc) and AMD (clang-19), embedded in the program; whichever compiler there is
	@scripts/setup.sh gpu --quiet
	@$(MAKE) --no-print-directory gpu-files
	@$(MAKE) --no-print-directory all

.PHONY: gpu-files
gpu-files: $(GPU_FILES)
	@for a in $(if $(NVCC),$(NV_ARCHS:%=%.cubin)); do scripts/gpu-budget.sh nvidia $(BUILD)/gpu/$$a.log || exit 1; done
	@for a in $(if $(AMD_CLANG),$(AMD_ARCHS:%=%.hsaco)); do scripts/gpu-budget.sh amd $(BUILD)/gpu/$$a.log || exit 1; done
	@$(if $(NVCC),,echo "  no nvcc: nothing for NVIDIA")
	@$(if $(AMD_CLANG),,echo "  no clang-19, no /opt/rocm: nothing for AMD")

$(BUILD)/gpu/sm_%.cubin: $(GPU_SRC)
	@mkdir -p $(@D)
	@echo "  NVCC sm_$*"
	@$(NVCC) -std=c++17 -O3 -fmad=false -I. -arch=sm_$* -Xptxas -v -cubin -o $@.part kernels/gpu/all.cu 2>$@.log || (cat $@.log; false)
	@mv $@.part $@
$(BUILD)/gpu/compute_80.ptx: $(GPU_SRC)
	@mkdir -p $(@D)
	@echo "  NVCC compute_80"
	@$(NVCC) -std=c++17 -O3 -fmad=false -I. -arch=compute_80 -ptx -o $@ kernels/gpu/all.cu
$(FATBIN): $(NV_ARCHS:%=$(BUILD)/gpu/%.cubin) $(BUILD)/gpu/compute_80.ptx
	@$(dir $(NVCC))fatbinary -64 --create=$@ $(foreach a,$(NV_ARCHS),--image3=kind=elf,sm=$(a:sm_%=%),file=$(BUILD)/gpu/$a.cubin) \
	  --image3=kind=ptx,sm=80,file=$(BUILD)/gpu/compute_80.ptx
$(BUILD)/gpu/gfx%.hsaco: $(GPU_SRC)
	@mkdir -p $(@D)
	@echo "  CLANG gfx$*"
	@$(AMD_CLANG) -x hip --cuda-device-only -nogpulib -nogpuinc --no-gpu-bundle-output --offload-arch=gfx$* -std=c++17 -O3 \
	  -ffp-contract=off -I. -Rpass-analysis=kernel-resource-usage -o $@.part kernels/gpu/all.cu 2>$@.log || (cat $@.log; false)
	@mv $@.part $@

DEVICE ?= cuda
DEVICE_JSON ?= $(BUILD)/device-check.json
.PHONY: device-check
device-check: $(BIN) $(BUILD)/tests/test_gpu_kernels $(BUILD)/tests/test_gpu_attention $(BUILD)/tests/test_gpu_experts $(BUILD)/tests/test_gpu_models ## checks and measures a GPU in under 8 minutes, one JSON: make device-check DEVICE=cuda:0
	@python3 scripts/device-check.py $(BUILD) $(DEVICE) $(DEVICE_JSON) $(wildcard $(SMOLLM2))

# ---------------------------------------------------------------- the demo
.PHONY: demo
demo: all model ## build, get the default model, run the example job, show results and report
	@scripts/demo.sh $(BIN) $(SMOLLM2)

# ---------------------------------------------------------------- tests
.PHONY: test check check-long unit cli tidy clang asan ubsan fuzz tsan test-programs
test-programs: $(BIN) $(TESTS)

test: ## all tests that CI runs; installs what they need
	@scripts/setup.sh test --quiet
	@$(MAKE) --no-print-directory -j$$(nproc) all test-programs
	@$(MAKE) --no-print-directory model
	@tests/run.sh $(BUILD) unit cli stop kill memory tidy clang asan fuzz-replay device-check

check: ## test, with the unit tests on every instruction set and the second model
	@scripts/setup.sh test --quiet
	@$(MAKE) --no-print-directory -j$$(nproc) all test-programs
	@$(MAKE) --no-print-directory models
	@tests/run.sh $(BUILD) unit isa cli stop kill memory tidy clang asan fuzz-replay device-check mutants

check-long: ## check, and the sanitizer builds of every suite, valgrind, 10 million rows, cron, systemd and Slurm if there (about two hours)
	@$(MAKE) --no-print-directory check
	@tests/run.sh $(BUILD) crash kill-long memory-long asan-all tsan valgrind cron systemd slurm

unit cli tidy clang: ## one suite of the tests
	@scripts/setup.sh test --quiet
	@$(MAKE) --no-print-directory -j$$(nproc) all test-programs
	@tests/run.sh $(BUILD) $@

asan ubsan: ## unit tests built with address and undefined-behaviour sanitizers
	@tests/run.sh $(BUILD) asan-all
fuzz: ## the fuzz targets (clang): build/fuzz/fuzz_*; tests/fuzz.sh SECONDS [NAME] runs them
	@scripts/setup.sh test --quiet
	@$(MAKE) --no-print-directory -j$$(nproc) MODE=fuzz BUILD=$(BUILD)/fuzz CC=clang $(FUZZERS:%=$(BUILD)/fuzz/%)
tsan: ## unit tests built with the thread sanitizer
	@tests/run.sh $(BUILD) tsan

# ---------------------------------------------------------------- bench, install
.PHONY: bench bench-peers install clean help
bench: all models ## limits of this machine, kernels, both models, a whole job; beside peers if there are
	@python3 scripts/bench.py $(BIN) $(SMOLLM2) $(GEMMA3)
bench-peers: ## the peers that `make bench` compares with, from PyPI, into build/peers (llama.cpp is compiled)
	@python3 -m venv $(BUILD)/peers
	@$(BUILD)/peers/bin/pip install --quiet --disable-pip-version-check openvino-genai
	@CMAKE_ARGS="-DGGML_NATIVE=ON" $(BUILD)/peers/bin/pip install --quiet --disable-pip-version-check --no-binary llama-cpp-python llama-cpp-python

install: all ## install under PREFIX (default /usr/local)
	install -Dm755 $(BIN) $(DESTDIR)$(PREFIX)/bin/millrace
	install -Dm644 docs/millrace.1 $(DESTDIR)$(PREFIX)/share/man/man1/millrace.1
	install -Dm644 docs/millrace.bash $(DESTDIR)$(PREFIX)/share/bash-completion/completions/millrace

clean: ## remove what was built (models stay)
	rm -rf $(BUILD)

help: ## this list
	@grep -hE '^[a-z -]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z -]+):[^#]*## /\1\t/' | awk -F'\t' '{printf "  %-24s %s\n", $$1, $$2}'
