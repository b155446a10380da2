# Writes OUT, a header with the hash of the sources in CSRC, and TEXT, the hash alone, where they differ from what is
# there. coattn/native/core.py
# makes the same hash of the sources that lie beside it and refuses an extension that was built from others.
file(GLOB_RECURSE sources RELATIVE ${CSRC} ${CSRC}/*.cpp ${CSRC}/*.h ${CSRC}/*.inl)
list(SORT sources)
set(lines "")
foreach(source ${sources})
  file(SHA256 ${CSRC}/${source} hash)
  string(APPEND lines "${hash} ${source}\n")
endforeach()
string(SHA256 hash "${lines}")
file(CONFIGURE OUTPUT ${TEXT} CONTENT "${hash}\n")
file(CONFIGURE OUTPUT ${OUT} CONTENT "#define COATTN_SOURCE_HASH \"${hash}\"\n")
