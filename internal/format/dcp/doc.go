// Package dcp reads and writes the files of PyTorch Distributed Checkpoint
// (DCP) directories. It is a codec: bytes in, structures out. It opens no
// file, runs no code that a pickle names, and allocates no more than a
// multiple of the bytes that it was given: what a pickle refers to many times
// is shared, or its copies are charged to a budget.
//
//	metadata   what .metadata says: each tensor's dtype, shape and chunks,
//	           each value, and where their archives are
//	chunk      a stored box of a tensor
//	value      any other Python object, saved under a name
//	archive    one chunk or value as torch.save writes it: a ZIP file
//	payload    the storage in a tensor's archive: raw elements
//
// A directory holds .metadata, a pickle, and files of archives placed one
// behind the other. Each rank writes its own files, values before chunks:
//
//	__0_0.distcp  |archive of a value|archive of a chunk|archive of a chunk|
//	__1_0.distcp  |archive of a chunk|
//	.metadata     state_dict_metadata: name → shape, dtype, chunks | value
//	              storage_data: (name, offsets) → file, offset, length
//	              planner_data: name → path in the nested state dict
//
// An archive has stored (never compressed) records. Their sizes and sums are
// in the data descriptors behind them and in the central directory; the extra
// field of a local header is padded so that the record begins at a multiple
// of 64 bytes from the start of the archive:
//
//	0            64                        n·64
//	|local header|archive/data.pkl|descr|…|local header|archive/data/0|descr|…
//	|central directory|zip64 end|zip64 locator|end|
//
// data.pkl is a pickle that says how to rebuild the tensor from the storage
// data/0: element offset, sizes and strides. byteorder says "little" or "big".
//
// Pickles are read by a machine that knows the opcodes and globals of such
// files alone. It builds inert structures; every other opcode or global is an
// error that names it.
package dcp
