# A thin front: every target is a call of CMake, ctest or a script of tools/.
# PRESET=debug, clang, asan, ... builds another preset; PREFIX=/usr moves the installation;
# JOBS=1 runs one test at a time.

PRESET ?= release
PREFIX ?= /usr/local
JOBS ?= $(shell nproc)

BUILD := build/$(PRESET)

.PHONY: all build demo test install format clean

all: build

build:
	cmake --preset $(PRESET)
	cmake --build --preset $(PRESET)

# Packages are installed by name where they are missing; quiet when all are there.
demo:
	tools/install-packages.sh build test
	cmake --preset $(PRESET)
	cmake --build --preset $(PRESET) --target sidepath_cli
	tools/demo.sh $(BUILD)/sidepath

test:
	tools/install-packages.sh build test peers style
	$(MAKE) build
	ctest --test-dir $(BUILD) --label-regex quick --output-on-failure --no-tests=error -j $(JOBS)

install: build
	cmake --install $(BUILD) --prefix $(PREFIX)

format:
	python3 -B tests/style/check_style.py --fix-format

clean:
	cmake -E rm -rf build
