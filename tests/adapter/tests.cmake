# The toy model is shared by the tests of opening.
foreach(name test_peft_config test_open test_fused test_tables test_hostile test_receipt
             test_from_tensors test_intake test_module_place test_promised)
  if(TARGET ${name})
    target_sources(${name} PRIVATE ${CMAKE_CURRENT_LIST_DIR}/toy.c)
  endif()
endforeach()
