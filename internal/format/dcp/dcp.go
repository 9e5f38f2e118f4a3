// Package dcp reads and writes the files of PyTorch Distributed Checkpoint (DCP) directories.
// It is a codec between bytes and structures. It opens no file, runs no code that a pickle
// names, and allocates no more than a multiple of its input: objects that a pickle refers to
// many times are shared, or their copies are charged to a budget.
//
//	metadata   the contents of .metadata: each tensor's dtype, shape and chunks,
//	           each value, and the places of their archives
//	chunk      a stored box of a tensor
//	value      any other Python object, saved under a name
//	archive    one chunk or value as torch.save writes it: a ZIP file
//	payload    the storage in a tensor's archive: raw elements
//
// A directory holds .metadata, a pickle, and files of consecutive archives. Each rank writes
// its own files, values before chunks:
//
//	__0_0.distcp  |archive of a value|archive of a chunk|archive of a chunk|
//	__1_0.distcp  |archive of a chunk|
//	.metadata     state_dict_metadata: name → shape, dtype, chunks | value
//	              storage_data: (name, offsets) → file, offset, length
//	              planner_data: name → path in the nested state dict
//
// An archive has stored (never compressed) records. Their sizes and sums are in the data
// descriptors behind them and in the central directory; the extra field of a local header is
// padded so that the record begins at a multiple of 64 bytes from the start of the archive:
//
//	0            64                        n·64
//	|local header|archive/data.pkl|descr|…|local header|archive/data/0|descr|…
//	|central directory|zip64 end|zip64 locator|end|
//
// data.pkl is a pickle of the element offset, sizes and strides with which the tensor is
// rebuilt from the storage data/0. byteorder contains "little" or "big".
//
// Pickles are read by a machine that knows only the opcodes and globals of such files. It
// builds inert structures. Every other opcode or global is an error that names it.
package dcp

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/tensor"
)

// MetadataFile is the name of the metadata in a checkpoint's directory. A save writes it
// last.
const MetadataFile = ".metadata"

// Metadata is the content of a .metadata file. Tensors and values are in the file's order;
// names are unique. Tensors of a dtype that package tensor lacks are among the values: see
// [Metadata.Opaque].
type Metadata struct {
	Tensors []Tensor
	Values  []Value
	Version string // of the metadata format, "1.0.0"; empty before PyTorch 2.7
	SaveID  string // of storage_meta, a UUID; empty if the file has none
}

// Tensor is a tensor in the checkpoint. The chunks lie in the shape, each at different
// offsets. Whether they cover it and do not overlap is not checked.
type Tensor struct {
	FQN string
	// Path is the tensor's place in the nested state dict, of string and int; nil if the file
	// does not record it.
	Path         []any
	DType        tensor.DType
	Shape        tensor.Shape
	RequiresGrad bool
	Chunks       []Chunk

	opaque bool // of a dtype that package tensor lacks
}

// Chunk is a stored box of a tensor.
type Chunk struct {
	Box   tensor.Box
	Where Location
}

// Value is a stored object that is not a tensor.
type Value struct {
	FQN   string
	Path  []any // as in [Tensor]
	Where Location
}

// Opaque returns m with the named tensors moved to the values, since their archives can only
// be passed on whole: quantized tensors, float4, conjugated views. A tensor of one chunk
// becomes the value of its name. Of a tensor of several chunks, each chunk becomes the value
// NAME@OFFSETS. Opaque fails if such a name is taken.
func (m Metadata) Opaque(names map[string]bool) (Metadata, error) {
	if len(names) == 0 {
		return m, nil
	}
	taken := map[string]bool{}
	out := Metadata{Version: m.Version, SaveID: m.SaveID, Values: slices.Clone(m.Values)}
	for _, v := range m.Values {
		taken[v.FQN] = true
	}
	for _, t := range m.Tensors {
		if !names[t.FQN] {
			taken[t.FQN] = true
			out.Tensors = append(out.Tensors, t)
		}
	}
	for _, t := range m.Tensors {
		if !names[t.FQN] {
			continue
		}
		for _, c := range t.Chunks {
			v := Value{FQN: t.FQN, Path: t.Path, Where: c.Where}
			if len(t.Chunks) > 1 {
				v.FQN, v.Path = t.FQN+"@"+c.Box.Key(), nil
			}
			if taken[v.FQN] {
				return Metadata{}, fmt.Errorf("chunk of tensor %s is kept as the value %s, which is taken: rename the other", quote(t.FQN), quote(v.FQN))
			}
			taken[v.FQN] = true
			out.Values = append(out.Values, v)
		}
	}
	return out, nil
}

// Location is a complete torch.save archive in a data file, in bytes.
type Location struct {
	File           string // name in the checkpoint's directory, such as "__3_0.distcp"
	Offset, Length int64
}

// DataFile returns the name of the n-th data file of a rank.
func DataFile(rank, n int) string { return fmt.Sprintf("__%d_%d.distcp", rank, n) }

// Validate returns an error for a file outside the checkpoint's directory, or for an
// impossible range.
func (l Location) Validate() error {
	switch {
	case l.File == "" || len(l.File) > maxName:
		return fmt.Errorf("file name of %d bytes", len(l.File))
	case path.IsAbs(l.File) || strings.ContainsAny(l.File, "\\:\x00"):
		return fmt.Errorf("file name %s is not a plain relative one", quote(l.File))
	case path.Clean(l.File) != l.File || l.File == "." || l.File == ".." || strings.HasPrefix(l.File, "../"):
		return fmt.Errorf("file name %s does not stay in the directory of the checkpoint", quote(l.File))
	case l.Offset < 0 || l.Length < 0 || l.Offset+l.Length < 0:
		return fmt.Errorf("range of %d bytes at offset %d of %s", l.Length, l.Offset, quote(l.File))
	}
	return nil
}

// FormatError reports a file that is damaged, or in a form that this package does not read.
type FormatError struct {
	File    string // empty for bytes without a file
	Offset  int64  // in the file, in bytes: of the record, or of the opcode in a pickle
	Problem string
}

// Error reports the file, offset and problem.
func (e *FormatError) Error() string {
	if e.File == "" {
		return fmt.Sprintf("archive: offset %d: %s", e.Offset, e.Problem)
	}
	return fmt.Sprintf("%s: offset %d: %s", e.File, e.Offset, e.Problem)
}

// ProblemKind returns [problem.Damage].
func (*FormatError) ProblemKind() problem.Kind { return problem.Damage }

// OpaqueError reports a well-formed value that is not of the plain kinds that [DecodeValue]
// knows. Its archive can only be passed on unchanged.
type OpaqueError struct {
	// Global is the Python class or function that the value needs, such as
	// "collections.deque"; empty for another reason.
	Global string
	Reason string
}

// Error reports the global or the reason.
func (e *OpaqueError) Error() string {
	if e.Global != "" {
		return fmt.Sprintf("value needs %s of Python: only None, bool, int, float, str, bytes, list, tuple and dict are decoded", e.Global)
	}
	return "value is not decoded: " + e.Reason
}

const (
	maxName = 1 << 12 // bytes of a file name
	maxFQN  = 1 << 16 // bytes of the name of a tensor or value
	maxPath = 256     // elements of a path
)

// quote quotes text from a file, clipped so that a message does not grow with the file.
func quote(s string) string {
	if len(s) > 96 {
		return fmt.Sprintf("%.96q…", s)
	}
	return fmt.Sprintf("%q", s)
}

// at adds file and offset to the problem of an inner function.
func at(file string, offset int64, err error) error {
	var known *FormatError
	var opaque *OpaqueError
	if err == nil || errors.As(err, &known) || errors.As(err, &opaque) {
		return err
	}
	return &FormatError{File: file, Offset: offset, Problem: err.Error()}
}
