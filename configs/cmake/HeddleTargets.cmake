include(CMakeParseArguments)
include(GoogleTest)

# heddle_library(NAME SRCS a.cc ... DEPS target ...)
# A static library whose headers are included from the root of the project.
function(heddle_library name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  if(ARG_SRCS)
    add_library(${name} STATIC ${ARG_SRCS})
    set(scope PUBLIC)
  else()
    add_library(${name} INTERFACE)
    set(scope INTERFACE)
  endif()
  target_include_directories(${name} ${scope} ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} ${scope} ${ARG_DEPS})
endfunction()

# heddle_test(NAME SRCS a_test.cc ... DEPS target ... LABELS unit [DISCOVER] [TIMEOUT s])
# A GoogleTest program. By default one ctest case a program; with DISCOVER one a
# TEST. Labels: unit, parsers, parallel, cache, schedule, world (threads as
# ranks), mpirun, nightly.
function(heddle_test name)
  cmake_parse_arguments(ARG "DISCOVER" "TIMEOUT" "SRCS;DEPS;LABELS" ${ARGN})
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} GTest::gmock GTest::gtest_main)
  target_compile_definitions(${name} PRIVATE HEDDLE_TESTS_DIR="${PROJECT_SOURCE_DIR}/tests")
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(ARG_DISCOVER)
    gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60
      PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT})
  else()
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT})
  endif()
endfunction()

# heddle_fuzzer(NAME SRCS a_fuzzer.cc DEPS target ...): a libFuzzer program.
function(heddle_fuzzer name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  if(HEDDLE_FUZZERS)
    add_executable(${name} ${ARG_SRCS})
    target_link_libraries(${name} PRIVATE ${ARG_DEPS})
    target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  endif()
endfunction()
