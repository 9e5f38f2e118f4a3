// Package foreign is the checkpoints of other programs: it reads them where
// they lie, without running any code of theirs, and writes them.
//
//	part     what the files of one rank hold, and where each chunk lies
//	survey   the parts of a checkpoint, found from headers and metadata alone
//	export   a checkpoint of any reader, written as another program would
//	claim    the directory beside an export's, in which it is made
//
//	FILE                                       one value, whatever is in it: [File]
//	DIR/.metadata  DIR/__R_N.distcp            PyTorch Distributed Checkpoint
//	NAME.safetensors                           one file
//	DIR/model.safetensors.index.json           Hugging Face
//	DIR/model-00001-of-00002.safetensors
//
// The bytes of these formats are the matter of packages dcp and safetensors;
// what a checkpoint is, and how its chunks are read, that of package data.
package foreign
