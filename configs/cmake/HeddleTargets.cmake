include(CMakeParseArguments)
include(GoogleTest)

# Headers that nearly every file reads, precompiled once for all targets compiled alike (LIKE names
# their kind): the first of them owns them. Does nothing unless HEDDLE_PRECOMPILED_HEADERS is set.
function(heddle_precompile name)
  cmake_parse_arguments(ARG "" "LIKE" "HEADERS" ${ARGN})
  if(NOT HEDDLE_PRECOMPILED_HEADERS)
    return()
  endif()
  get_property(owner GLOBAL PROPERTY heddle_precompiled_${ARG_LIKE})
  if(owner)
    target_precompile_headers(${name} REUSE_FROM ${owner})
  else()
    target_precompile_headers(${name} PRIVATE ${ARG_HEADERS})
    set_property(GLOBAL PROPERTY heddle_precompiled_${ARG_LIKE} ${name})
  endif()
endfunction()

# heddle_library(NAME SRCS a.cc ... DEPS target ...)
# A static library whose headers are included from the root of the project.
function(heddle_library name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  if(ARG_SRCS)
    add_library(${name} STATIC ${ARG_SRCS})
    set(scope PUBLIC)
    heddle_precompile(${name} LIKE libraries HEADERS
      <algorithm> <functional> <memory> <optional> <string> <utility> <vector>
      <absl/status/statusor.h> <absl/strings/str_cat.h>)
  else()
    add_library(${name} INTERFACE)
    set(scope INTERFACE)
  endif()
  target_include_directories(${name} ${scope} ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} ${scope} ${ARG_DEPS})
endfunction()

# heddle_test(NAME SRCS a_test.cc ... DEPS target ... LABELS unit [DISCOVER] [SERIAL] [TIMEOUT s])
# A GoogleTest program. By default one ctest case a program; with DISCOVER one a
# TEST. Labels: unit, parsers, parallel, cache, schedule, world (threads as
# ranks), mpirun, nightly; a discovered TEST whose name begins with Nightly has
# that label alone. SERIAL: nothing else runs meanwhile, since the test keeps
# deadlines. The target tests_LABEL builds all programs of a label.
function(heddle_test name)
  cmake_parse_arguments(ARG "DISCOVER;SERIAL" "TIMEOUT" "SRCS;DEPS;LABELS" ${ARGN})
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} GTest::gmock GTest::gtest_main)
  heddle_precompile(${name} LIKE tests HEADERS
    <algorithm> <functional> <memory> <optional> <random> <string> <utility> <vector>
    <absl/status/statusor.h> <absl/strings/str_cat.h> <gmock/gmock.h> <gtest/gtest.h>)
  target_compile_definitions(${name} PRIVATE HEDDLE_TESTS_DIR="${PROJECT_SOURCE_DIR}/tests")
  if(CMAKE_BUILD_TYPE STREQUAL "Release")
    target_compile_options(${name} PRIVATE -O1)  # what is tested is fast; tests need not be
  endif()
  foreach(label IN LISTS ARG_LABELS)
    if(NOT TARGET tests_${label})
      add_custom_target(tests_${label})
    endif()
    add_dependencies(tests_${label} ${name})
  endforeach()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 400)  # of a loaded machine, under a sanitizer
  endif()
  if(ARG_DISCOVER)
    gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 TEST_FILTER "-Nightly*"
      PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT} RUN_SERIAL ${ARG_SERIAL})
    gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 TEST_FILTER "Nightly*"
      TEST_LIST ${name}_NIGHTLY PROPERTIES LABELS nightly TIMEOUT 3600)
  else()
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES
      LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT} RUN_SERIAL ${ARG_SERIAL})
  endif()
endfunction()

# heddle_fuzzer(NAME SRCS a_fuzzer.cc DEPS target ...): a libFuzzer program, NAME ending in
# _fuzzer; its corpus is tests/fuzz/corpus/NAME without that. The target fuzzers builds them all.
function(heddle_fuzzer name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  if(HEDDLE_FUZZERS)
    add_executable(${name} ${ARG_SRCS})
    target_link_libraries(${name} PRIVATE ${ARG_DEPS})
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
    if(NOT TARGET fuzzers)
      add_custom_target(fuzzers)
    endif()
    add_dependencies(fuzzers ${name})
  endif()
endfunction()
