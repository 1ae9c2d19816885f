# Language level, warnings and sanitizers of every target of the project.
option(HEDDLE_TESTS "Build the tests" ON)
option(HEDDLE_BENCHMARKS "Build the Google Benchmark programs of tests/bench" ON)
option(HEDDLE_FUZZERS "Build the libFuzzer programs (needs clang)" OFF)
option(HEDDLE_ONE_SIMD_TARGET "Compile kernels for AVX2 alone, not for each instruction set" OFF)
option(HEDDLE_PRECOMPILED_HEADERS "Read common headers once; hides includes that are missing" OFF)
set(HEDDLE_SANITIZE "" CACHE STRING "Sanitizers, as in -fsanitize=: address,undefined or thread")

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

find_program(HEDDLE_CCACHE ccache)
if(HEDDLE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_C_COMPILER_LAUNCHER ${HEDDLE_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${HEDDLE_CCACHE})
endif()

add_compile_options(-Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wno-unused-parameter -Werror)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 warns of overlaps inside std::string's operator+ that cannot happen (GCC bug 105651).
  add_compile_options(-Wno-restrict)
endif()
# A product and a sum that one translation unit fuses and another does not would
# break the promise of equal bits; kernels ask for fused multiply-add by name.
add_compile_options(-ffp-contract=off)

if(HEDDLE_ONE_SIMD_TARGET)
  add_compile_options(-march=haswell -maes)
  add_compile_definitions(HWY_COMPILE_ONLY_STATIC)
endif()

if(HEDDLE_SANITIZE)
  add_compile_options(-fsanitize=${HEDDLE_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all -g1)
  add_link_options(-fsanitize=${HEDDLE_SANITIZE})
endif()
if(HEDDLE_FUZZERS)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "HEDDLE_FUZZERS needs clang; set CMAKE_CXX_COMPILER, or use the preset asan")
  endif()
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()
