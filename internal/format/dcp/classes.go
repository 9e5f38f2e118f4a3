package dcp

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/tensor"
)

const (
	metadataModule = "torch.distributed.checkpoint.metadata"
	legacyModule   = "torch.distributed._shard.sharded_tensor.metadata"
)

// The classes and functions of .metadata. Nothing is ever called: an object that a pickle
// constructs stays a [call].
var (
	classMetadata    = global{metadataModule, "Metadata"}
	classTensor      = global{metadataModule, "TensorStorageMetadata"}
	classProperties  = global{metadataModule, "TensorProperties"}
	classChunk       = global{metadataModule, "ChunkStorageMetadata"}
	classBytes       = global{metadataModule, "BytesStorageMetadata"}
	classIndex       = global{metadataModule, "MetadataIndex"}
	classStorageMeta = global{metadataModule, "StorageMeta"}
	classMemFormat   = global{metadataModule, "_MEM_FORMAT_ENCODING"}
	classStorageInfo = global{"torch.distributed.checkpoint.filesystem", "_StorageInfo"}
	classSize        = global{"torch", "Size"}
	classLayout      = global{"torch.serialization", "_get_layout"}
	legacyProperties = global{legacyModule, "TensorProperties"}
	legacyMemFormat  = global{legacyModule, "MEM_FORMAT_ENCODING"}
	classPath        = global{"pathlib", "PosixPath"}
	classPathLocal   = global{"pathlib._local", "PosixPath"}
	metadataClasses  = []global{
		classMetadata, classTensor, classProperties, classChunk, classBytes, classIndex,
		classStorageMeta, classMemFormat, classStorageInfo, classSize, classLayout,
		legacyProperties, legacyMemFormat, classPath, classPathLocal,
	}
	metadataDialect = dialect{ops: metadataOps, globals: func(g global) bool {
		return isDType(g) || isOtherDType(g) || slices.Contains(metadataClasses, g)
	}}
)

// isDType reports whether g is a dtype, which is pickled as a bare global: "torch float32".
func isDType(g global) bool {
	if g.module != "torch" {
		return false
	}
	_, err := tensor.ParseDType(g.name)
	return err == nil
}

// otherDTypes are PyTorch's dtypes that package tensor lacks. Their elements are parts of
// bytes, or are meaningless without a scale that lies elsewhere.
var otherDTypes = []string{
	"quint8", "qint8", "qint32", "quint4x2", "quint2x4", "float4_e2m1fn_x2", "bcomplex32",
	"bits1x8", "bits2x4", "bits4x2", "bits8", "bits16",
	"int1", "int2", "int3", "int4", "int5", "int6", "int7",
	"uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7",
}

// isOtherDType reports whether g is a dtype that is known by name only: a message about it
// has to name the tensor.
func isOtherDType(g global) bool { return g.module == "torch" && slices.Contains(otherDTypes, g.name) }

// supported lists the dtypes of tensors, for messages.
func supported() string {
	var names []string
	for d := tensor.DType(0); d < math.MaxUint8; d++ {
		if d.Valid() {
			names = append(names, d.String())
		}
	}
	return strings.Join(names, ", ")
}

// absent is the value of a field that an object does not set.
type absent struct{}

// object returns v as an object of class, made without arguments.
func object(v any, class global) (*call, error) {
	c, ok := v.(*call)
	if !ok || c.fn != class || !c.new || len(c.args) != 0 {
		return nil, fmt.Errorf("want an object of %s, got %s", class.name, kind(v))
	}
	return c, nil
}

// fields returns the values of the named fields of an object of class; absent{} for unset
// ones. A field of another name is an error, unless more.
func fields(v any, class global, more bool, names ...string) ([]any, *call, error) {
	c, err := object(v, class)
	if err != nil {
		return nil, nil, err
	}
	out := make([]any, len(names))
	for i := range out {
		out[i] = absent{}
	}
	state, ok := c.state.(*dict)
	if !ok {
		return nil, nil, fmt.Errorf("%s has %s for its fields", class.name, kind(c.state))
	}
	for i := 0; i < len(state.pairs); i += 2 {
		name, ok := state.pairs[i].(string)
		if !ok {
			return nil, nil, fmt.Errorf("%s has %s for a field's name", class.name, kind(state.pairs[i]))
		}
		at := slices.Index(names, name)
		if at < 0 {
			if more {
				continue
			}
			return nil, nil, fmt.Errorf("%s has the unknown field %s", class.name, quote(name))
		}
		if out[at] != any(absent{}) {
			return nil, nil, fmt.Errorf("%s has the field %s twice", class.name, name)
		}
		out[at] = state.pairs[i+1]
	}
	return out, c, nil
}

// one returns the argument of a call of fn with one argument.
func one(v any, fn global) (any, error) {
	c, ok := v.(*call)
	if !ok || c.fn != fn || c.new || c.built || len(c.args) != 1 {
		return nil, fmt.Errorf("want %s, got %s", fn.name, kind(v))
	}
	return c.args[0], nil
}

// sizeOf returns the dimensions of a torch.Size, or of the tuple that older versions write.
func sizeOf(v any) (tuple, error) {
	if c, ok := v.(*call); ok {
		arg, err := one(c, classSize)
		if err != nil {
			return nil, err
		}
		v = arg
	}
	t, ok := v.(tuple)
	if !ok {
		return nil, fmt.Errorf("want a torch.Size, got %s", kind(v))
	}
	return t, checkDimensions(t)
}

// checkDimensions returns an error for a dimension that is not a number, or negative.
func checkDimensions(t tuple) error {
	if len(t) > tensor.MaxDims {
		return fmt.Errorf("%d dimensions, at most %d are allowed", len(t), tensor.MaxDims)
	}
	for i, v := range t {
		if n, ok := v.(int64); !ok || n < 0 {
			return fmt.Errorf("dimension %d is %s, want a number from 0 to 2^63", i, show(v))
		}
	}
	return nil
}

// numbers copies the dimensions of a tuple.
func numbers(t tuple) ([]int64, error) {
	if err := checkDimensions(t); err != nil {
		return nil, err
	}
	out := make([]int64, len(t))
	for i, v := range t {
		out[i], _ = v.(int64)
	}
	return out, nil
}

func show(v any) string {
	if n, ok := v.(int64); ok {
		return fmt.Sprint(n)
	}
	return kind(v)
}

// otherDTypeError reports a dtype that package tensor lacks: the tensor's archives are kept
// as values.
type otherDTypeError struct{ name string }

func (e *otherDTypeError) Error() string {
	return fmt.Sprintf("dtype %s is not supported, those that are: %s", e.name, supported())
}

// properties returns dtype and requires_grad of a TensorProperties. Only dense tensors have a
// place in a data file. The error is an [*otherDTypeError] if only the dtype is unsupported.
func properties(v any) (tensor.DType, bool, error) {
	c, err := object(v, classProperties)
	legacy := false
	if err != nil {
		if c, err = object(v, legacyProperties); err != nil {
			return 0, false, fmt.Errorf("want TensorProperties, got %s", kind(v))
		}
		legacy = true
	}
	state, ok := c.state.(tuple)
	if !ok || (len(state) != 5 && len(state) != 6) {
		return 0, false, errors.New("TensorProperties has not the fields dtype, layout, requires_grad, memory_format, pin_memory and perhaps strides")
	}
	if len(state) == 6 && state[5] != nil {
		// PyTorch 2.15 adds the strides that the tensor had in memory; a
		// chunk's are in its archive.
		if _, err := sizeOf(state[5]); err != nil {
			return 0, false, fmt.Errorf("strides: %w", err)
		}
	}
	g, ok := state[0].(global)
	if !ok || !isDType(g) && !isOtherDType(g) {
		return 0, false, fmt.Errorf("dtype is %s", kind(state[0]))
	}
	layout, err := one(state[1], classLayout)
	if err != nil {
		return 0, false, fmt.Errorf("layout: %w", err)
	}
	if layout != "torch.strided" {
		name, _ := layout.(string)
		return 0, false, fmt.Errorf("layout %s: only torch.strided is read", quote(name))
	}
	grad, ok := state[2].(bool)
	if !ok {
		return 0, false, fmt.Errorf("requires_grad is %s", kind(state[2]))
	}
	format := classMemFormat
	if legacy {
		format = legacyMemFormat
	}
	if n, err := one(state[3], format); err != nil {
		return 0, false, fmt.Errorf("memory_format: %w", err)
	} else if n, ok := n.(int64); !ok || n < 0 || n > 2 {
		return 0, false, fmt.Errorf("memory_format: encoding %s is not known", show(n))
	}
	if _, ok := state[4].(bool); !ok {
		return 0, false, fmt.Errorf("pin_memory is %s", kind(state[4]))
	}
	if isOtherDType(g) {
		return 0, grad, &otherDTypeError{g.name}
	}
	dtype, err := tensor.ParseDType(g.name)
	return dtype, grad, err
}
