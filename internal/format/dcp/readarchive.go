package dcp

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/ckptstore/ckptstore/tensor"
)

var (
	rebuildV2        = global{"torch._utils", "_rebuild_tensor_v2"}
	rebuildV3        = global{"torch._utils", "_rebuild_tensor_v3"}
	rebuildParameter = global{"torch._utils", "_rebuild_parameter"}
	orderedDict      = global{"collections", "OrderedDict"}
	untypedStorage   = global{"torch.storage", "UntypedStorage"}
)

// storageTypes are the classes that determine the dtype of a storage. Later dtypes have no
// class here: they are saved as untyped storages with a separate dtype.
var storageTypes = map[string]tensor.DType{
	"BoolStorage": tensor.Bool, "ByteStorage": tensor.Uint8, "CharStorage": tensor.Int8,
	"ShortStorage": tensor.Int16, "IntStorage": tensor.Int32, "LongStorage": tensor.Int64,
	"HalfStorage": tensor.Float16, "BFloat16Storage": tensor.BFloat16,
	"FloatStorage": tensor.Float32, "DoubleStorage": tensor.Float64,
	"ComplexFloatStorage": tensor.Complex64, "ComplexDoubleStorage": tensor.Complex128,
}

var tensorDialect = dialect{ops: tensorOps, globals: func(g global) bool {
	switch g {
	case rebuildV2, rebuildV3, rebuildParameter, orderedDict, untypedStorage:
		return true
	}
	if _, ok := storageTypes[g.name]; ok && g.module == "torch" {
		return true
	}
	return isDType(g)
}}

// maxPickle bounds the pickle of one tensor, in bytes.
const maxPickle = 1 << 16

// ReadArchive reads the archive of a tensor at where, except the storage's bytes: these are
// at Offset of the payload, and their sum is not checked. Errors of the format are of type
// [*FormatError]; those of r are wrapped.
func ReadArchive(r io.ReaderAt, where Location) (Payload, error) {
	p, err := readArchive(r, where)
	if err != nil {
		return Payload{}, fmt.Errorf("read archive: %w", err)
	}
	return p, nil
}

func readArchive(r io.ReaderAt, where Location) (Payload, error) {
	a, err := openArchive(r, where)
	if err != nil {
		return Payload{}, err
	}
	var storage record
	for _, rec := range a.records {
		switch {
		case rec.name == "data.pkl" || rec.name == "byteorder" || rec.name == "version" || strings.HasPrefix(rec.name, "."):
		case storage.name == "" && strings.HasPrefix(rec.name, "data/"):
			storage = rec
		default:
			return Payload{}, a.problem(rec.header, "record %s is not one of a tensor's archive", quote(rec.name))
		}
	}
	p := Payload{}
	if p.BigEndian, err = a.header(); err != nil {
		return p, err
	}
	pickle, ok := a.find("data.pkl")
	if !ok {
		return p, a.problem(0, "no record data.pkl")
	}
	data, err := a.content(pickle, maxPickle)
	if err != nil {
		return p, err
	}
	root, err := unpickle(tensorDialect, data, where.File, where.Offset+pickle.data)
	if err != nil {
		return p, err
	}
	key, untyped, numel, err := p.rebuild(root)
	if err != nil {
		return p, a.problem(pickle.data, "data.pkl: %v", err)
	}
	if storage.name != "data/"+key {
		return p, a.problem(pickle.data, "data.pkl wants the record data/%s, the archive has %s", clip(key), quote(storage.name))
	}
	p.Offset, p.Length, p.CRC32 = where.Offset+storage.data, storage.size, storage.crc
	size := int64(p.DType.Size())
	if untyped {
		size = 1
	}
	if numel < 0 || numel != p.Length/size || p.Length%size != 0 {
		return p, a.problem(storage.header, "storage of %d bytes, data.pkl has %d elements of %d bytes", p.Length, numel, size)
	}
	if err := p.bounds(); err != nil {
		return p, a.problem(pickle.data, "data.pkl: %v", err)
	}
	return p, nil
}

// header checks the version of the archive and returns its byte order.
func (a *archive) header() (bigEndian bool, err error) {
	rec, ok := a.find("version")
	if !ok {
		if rec, ok = a.find(".data/version"); !ok {
			return false, a.problem(0, "no record version")
		}
	}
	text, err := a.content(rec, 32)
	if err != nil {
		return false, err
	}
	if n, err := strconv.Atoi(strings.TrimSpace(string(text))); err != nil || n < 1 || n > 10 {
		return false, a.problem(rec.data, "version %s of the archive: those from 1 to 10 are read", quote(string(text)))
	}
	rec, ok = a.find("byteorder")
	if !ok {
		return false, nil
	}
	if text, err = a.content(rec, 32); err != nil {
		return false, err
	}
	if order := string(text); order != "little" && order != "big" {
		return false, a.problem(rec.data, "byte order %s", quote(order))
	}
	return string(text) == "big", nil
}

// rebuild reads the arguments of the function that would make the tensor. It fills in the
// payload from the pickle and returns the storage's key and its number of elements, or of
// bytes if it is untyped.
func (p *Payload) rebuild(root any) (key string, untyped bool, numel int64, err error) {
	fail := func(format string, args ...any) (string, bool, int64, error) {
		return "", false, 0, fmt.Errorf(format, args...)
	}
	c, ok := root.(*call)
	if ok && c.fn == rebuildParameter {
		// data, requires_grad, backward_hooks
		if len(c.args) != 3 || !isBool(c.args[1]) || !isHooks(c.args[2]) {
			return fail("%s with unknown arguments", c.fn.name)
		}
		c, ok = c.args[0].(*call)
	}
	if !ok || (c.fn != rebuildV2 && c.fn != rebuildV3) {
		return fail("want a tensor, got %s", kind(root))
	}
	// storage, offset, size, stride, requires_grad, backward_hooks, then dtype in the third
	// version, then optional metadata
	args, dtype := c.args, any(nil)
	if c.fn == rebuildV3 && len(args) > 6 {
		dtype = args[6]
		args = append(args[:6:6], args[7:]...)
	}
	if len(args) != 6 && len(args) != 7 {
		return fail("%s with %d arguments", c.fn.name, len(c.args))
	}
	if len(args) == 7 {
		if p.Altered, err = altered(args[6]); err != nil {
			return "", false, 0, err
		}
	}
	if !isBool(args[4]) || !isHooks(args[5]) {
		return fail("%s with unknown arguments", c.fn.name)
	}
	key, storage, numel, err := storageOf(args[0])
	if err != nil {
		return "", false, 0, err
	}
	switch named, _ := dtype.(global); {
	case c.fn == rebuildV3 && storage == untypedStorage && isDType(named):
		if p.DType, err = tensor.ParseDType(named.name); err != nil {
			return "", false, 0, err
		}
	case c.fn == rebuildV2 && storage.module == "torch" && storageTypes[storage.name].Valid():
		p.DType = storageTypes[storage.name]
	default:
		return fail("%s of a storage %s with dtype %s", c.fn.name, clip(storage.String()), kind(dtype))
	}
	if p.First, ok = args[1].(int64); !ok {
		return fail("storage offset is %s", kind(args[1]))
	}
	sizes, ok := args[2].(tuple)
	strides, ok2 := args[3].(tuple)
	if !ok || !ok2 || len(sizes) != len(strides) {
		return fail("sizes and strides are %s and %s of different length", kind(args[2]), kind(args[3]))
	}
	if p.Sizes, err = numbers(sizes); err != nil {
		return fail("sizes: %w", err)
	}
	if p.Strides, err = numbers(strides); err != nil {
		return fail("strides: %w", err)
	}
	return key, storage == untypedStorage, numel, nil
}

func isBool(v any) bool { _, ok := v.(bool); return ok }

// isHooks reports whether v is backward hooks in their saved form: none.
func isHooks(v any) bool {
	c, ok := v.(*call)
	return ok && c.fn == orderedDict && len(c.args) == 0 && !c.built
}

// altered reports whether the metadata of a tensor has the bit conj or neg set.
func altered(v any) (bool, error) {
	if v == nil {
		return false, nil
	}
	d, ok := v.(*dict)
	if !ok {
		return false, fmt.Errorf("metadata of the tensor is %s", kind(v))
	}
	set := false
	for i := 0; i < len(d.pairs); i += 2 {
		name, _ := d.pairs[i].(string)
		switch on, ok := d.pairs[i+1].(bool); {
		case !ok, on && name != "conj" && name != "neg":
			return false, fmt.Errorf("the tensor has the bit %s set, which is not known", quote(name))
		case on:
			set = true
		}
	}
	return set, nil
}

// storageOf reads persid('storage', class, key, device, numel).
func storageOf(v any) (key string, class global, numel int64, err error) {
	fail := errors.New("want a storage of class, key, device and size")
	p, ok := v.(persistent)
	if !ok {
		return "", global{}, 0, fail
	}
	t, ok := p.id.(tuple)
	if !ok || len(t) != 5 || t[0] != "storage" {
		return "", global{}, 0, fail
	}
	class, ok1 := t[1].(global)
	key, ok2 := t[2].(string)
	_, ok3 := t[3].(string)
	numel, ok4 := t[4].(int64)
	if !ok1 || !ok2 || !ok3 || !ok4 {
		return "", global{}, 0, fail
	}
	return key, class, numel, nil
}

// bounds checks that all elements lie in the storage, with no sum beyond
// 2^63.
func (p *Payload) bounds() error {
	if err := checkShape(p.DType, p.Sizes); err != nil {
		return err
	}
	have := p.Length / int64(p.DType.Size())
	if p.First < 0 || p.First > have {
		return fmt.Errorf("storage offset %d is not in the storage of %d elements", p.First, have)
	}
	if p.Volume() == 0 {
		return nil
	}
	left := have - p.First - 1 // behind the first element
	for d, n := range p.Sizes {
		if left < 0 || (n > 1 && p.Strides[d] > left/(n-1)) {
			left = -1
			break
		}
		left -= (n - 1) * p.Strides[d]
	}
	if left < 0 {
		return fmt.Errorf("sizes %v with strides %v from element %d are not within the storage of %d elements", p.Sizes, p.Strides, p.First, have)
	}
	return nil
}
