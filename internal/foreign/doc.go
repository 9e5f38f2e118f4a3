// Package foreign reads the checkpoints of other programs in place, without running any code
// of theirs, and writes them.
//
//	part     the contents of the files of one rank, and the place of each chunk
//	survey   the parts of a checkpoint, found from headers and metadata alone
//	export   a checkpoint of any reader, written as another program would
//	claim    the directory next to an export's, in which it is made
//
//	FILE                                       one value with any contents: [File]
//	DIR/.metadata  DIR/__R_N.distcp            PyTorch Distributed Checkpoint
//	NAME.safetensors                           one file
//	DIR/model.safetensors.index.json           Hugging Face
//	DIR/model-00001-of-00002.safetensors
//
// Packages dcp and safetensors define the bytes of these formats; package data defines
// checkpoints and reads their chunks.
package foreign
