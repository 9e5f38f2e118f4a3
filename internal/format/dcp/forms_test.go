package dcp

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/tensor"
)

// form is the metadata of one tensor and one value in which a test replaces a
// part; nil parts are as this package writes them.
type form struct {
	properties, size, info, planner, meta, index, extra func(w *metadataWriter)
}

func (f form) pickle() []byte {
	w := &metadataWriter{pickler: newPickler(4)}
	or := func(part func(*metadataWriter), usual func(*metadataWriter)) {
		if part == nil {
			part = usual
		}
		part(w)
	}
	w.begin(classMetadata)
	w.text("state_dict_metadata")
	w.op(opEmptyDict, opMark)
	w.text("w")
	w.begin(classTensor)
	w.text("properties")
	or(f.properties, func(w *metadataWriter) { w.properties(classProperties, classMemFormat, "float32", 0, false) })
	w.text("size")
	or(f.size, func(w *metadataWriter) { w.size(described, []int64{4, 2}) })
	w.text("chunks")
	w.op(opEmptyList)
	w.begin(classChunk)
	w.text("offsets")
	w.size(described, []int64{0, 0})
	w.text("sizes")
	w.size(described, []int64{4, 2})
	w.end()
	w.op(opAppend)
	w.end()
	w.text("step")
	w.global(classBytes)
	w.op(opEmptyTuple, opNewObj, opSetItems)
	w.text("planner_data")
	or(f.planner, func(w *metadataWriter) { w.op(opNone) })
	w.text("storage_data")
	w.op(opEmptyDict, opMark)
	or(f.index, func(w *metadataWriter) { w.index("w", []int64{0, 0}, 0) })
	or(f.info, func(w *metadataWriter) { w.location(Location{"__0_0.distcp", 10, 20}) })
	w.index("step", nil, -1)
	w.location(Location{"__0_0.distcp", 0, 10})
	or(f.extra, func(*metadataWriter) {})
	w.op(opSetItems)
	w.text("storage_meta")
	or(f.meta, func(w *metadataWriter) { w.op(opNone) })
	w.end()
	w.op(opStop)
	return w.b
}

func (w *metadataWriter) properties(class, format global, dtype string, encoding int64, strides bool) {
	w.global(class)
	w.op(opEmptyTuple, opNewObj, opMark)
	w.global(global{"torch", dtype})
	w.global(classLayout)
	w.text("torch.strided")
	w.op(opTuple1, opReduce, opNewTrue)
	w.global(format)
	w.int(encoding)
	w.op(opTuple1, opReduce, opNewFalse)
	if strides {
		w.ints([]int64{1, 4})
	}
	w.op(opTuple, opBuild)
}

func (w *metadataWriter) info(more func()) {
	w.begin(classStorageInfo)
	w.text("relative_path")
	w.text("__0_0.distcp")
	w.text("offset")
	w.int(10)
	w.text("length")
	w.int(20)
	more()
	w.end()
}

func (w *metadataWriter) storageMeta(path global, parts ...string) {
	w.begin(classStorageMeta)
	w.text("checkpoint_id")
	w.global(path)
	w.op(opMark)
	for _, part := range parts {
		w.text(part)
	}
	w.op(opTuple, opReduce)
	w.text("save_id")
	w.text("abc")
	w.end()
}

// The forms that versions of PyTorch and of Python write.
func TestFormsOfMetadata(t *testing.T) {
	want := Metadata{
		Tensors: []Tensor{{FQN: "w", DType: tensor.Float32, Shape: tensor.Shape{4, 2}, RequiresGrad: true, Chunks: []Chunk{
			{tensor.Box{Offsets: []int64{0, 0}, Sizes: []int64{4, 2}}, Location{"__0_0.distcp", 10, 20}},
		}}},
		Values: []Value{{FQN: "step", Where: Location{"__0_0.distcp", 0, 10}}},
	}
	for name, c := range map[string]struct {
		form   form
		change func(*Metadata)
	}{
		"usual": {form{properties: func(w *metadataWriter) { w.properties(classProperties, classMemFormat, "float32", 0, false) }}, nil},
		"properties up to 2.2": {form{properties: func(w *metadataWriter) {
			w.properties(legacyProperties, legacyMemFormat, "float32", 2, false)
		}}, nil},
		"properties from 2.15": {form{properties: func(w *metadataWriter) { w.properties(classProperties, classMemFormat, "float32", 1, true) }}, nil},
		"size as a tuple":      {form{size: func(w *metadataWriter) { w.ints([]int64{4, 2}) }}, nil},
		"path in one part": {
			form{meta: func(w *metadataWriter) { w.storageMeta(classPath, "/a/b") }},
			func(m *Metadata) { m.SaveID = "abc" },
		},
		"path in parts": {
			form{meta: func(w *metadataWriter) { w.storageMeta(classPathLocal, "/", "a", "b") }},
			func(m *Metadata) { m.SaveID = "abc" },
		},
		"no transforms": {form{info: func(w *metadataWriter) {
			w.info(func() { w.text("transform_descriptors"); w.op(opEmptyList) })
		}}, nil},
		"None for transforms": {form{info: func(w *metadataWriter) {
			w.info(func() { w.text("transform_descriptors"); w.op(opNone) })
		}}, nil},
		"paths": {form{planner: func(w *metadataWriter) {
			w.op(opEmptyDict, opMark)
			w.path("w", []any{"w"})
			w.path("step", []any{"a", 1, "step"})
			w.path("gone", []any{"gone"})
			w.op(opSetItems)
		}}, func(m *Metadata) { m.Tensors[0].Path, m.Values[0].Path = []any{"w"}, []any{"a", 1, "step"} }},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ReadMetadata(c.form.pickle())
			if err != nil {
				t.Fatal(err)
			}
			want := want
			want.Tensors = slices.Clone(want.Tensors)
			want.Values = slices.Clone(want.Values)
			if c.change != nil {
				c.change(&want)
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("got\n%+v\nwant\n%+v", got, want)
			}
		})
	}
}

func TestContradictoryMetadata(t *testing.T) {
	properties := func(dtype string, format global, encoding int64) form {
		return form{properties: func(w *metadataWriter) { w.properties(classProperties, format, dtype, encoding, false) }}
	}
	location := func(where Location) form {
		return form{info: func(w *metadataWriter) { w.location(where) }}
	}
	size := func(ns ...int64) form { return form{size: func(w *metadataWriter) { w.size(described, ns) }} }
	index := func(fqn string, offsets []int64, hint int) form {
		return form{index: func(w *metadataWriter) { w.index(fqn, offsets, hint) }}
	}
	for name, c := range map[string]struct {
		form form
		want string
	}{
		"compressed": {form{info: func(w *metadataWriter) {
			w.info(func() { w.text("transform_descriptors"); w.op(opEmptyList); w.text("zstd"); w.op(opAppend) })
		}}, `"w": written through the transform "zstd": only untransformed files are read`},
		"compressed, as a tuple": {form{info: func(w *metadataWriter) {
			w.info(func() { w.text("transform_descriptors"); w.text("zstd"); w.op(opTuple1) })
		}}, `the transform "zstd"`},
		"unknown field":      {form{info: func(w *metadataWriter) { w.info(func() { w.text("key"); w.op(opNone) }) }}, `_StorageInfo has the unknown field "key"`},
		"field twice":        {form{info: func(w *metadataWriter) { w.info(func() { w.text("offset"); w.op(opNone) }) }}, "_StorageInfo has the field offset twice"},
		"file of the parent": {location(Location{"../x", 0, 1}), `file name "../x" does not stay in the directory`},
		"absolute file":      {location(Location{"/etc/passwd", 0, 1}), `"/etc/passwd" is not a plain relative one`},
		"negative offset":    {location(Location{"f", -1, 1}), "range of 1 bytes at offset -1"},
		"end beyond 2^63":    {location(Location{"f", 1 << 62, 1 << 62}), "range of"},
		"dtype unknown":      {properties("float1", classMemFormat, 0), "global torch.float1 is not allowed"},
		"name empty":         {index("", []int64{0, 0}, 0), "storage_data: empty name"},
		"name long":          {index(strings.Repeat("k", 70000), []int64{0, 0}, 0), "storage_data: name of 70000 bytes, at most 65536 are allowed"},
		"dtype is a class":   {properties("Size", classMemFormat, 0), "dtype is the global torch.Size"},
		"format of another":  {properties("float32", legacyMemFormat, 0), "memory_format: want _MEM_FORMAT_ENCODING"},
		"format unknown":     {properties("float32", classMemFormat, 7), "encoding 7 is not known"},
		"chunk outside":      {size(3, 2), "is out of bounds of shape [3 2]"},
		"too few dimensions": {size(4), "has not the 1 dimensions"},
		"too many elements":  {size(1<<62, 2), "2^63"},
		"too many bytes":     {size(1<<60, 2), "more than 2^63 bytes"},
		"negative size":      {size(-4, 2), "dimension 0 is -4"},
		"other tensor":       {index("v", []int64{0, 0}, 0), "no archive in storage_data is left for offsets [0 0]"},
		"other offset":       {index("w", []int64{1, 0}, 0), "no archive in storage_data is left for offsets [0 0]"},
		"no offset":          {index("w", nil, -1), "no archive in storage_data is left"},
		"same key twice": {form{extra: func(w *metadataWriter) {
			w.index("w", []int64{0, 0}, 5)
			w.location(Location{"f", 0, 1})
		}}, `"w" occurs twice with the same offset`},
		"archive of nothing": {form{extra: func(w *metadataWriter) {
			w.index("w", []int64{2, 0}, 5)
			w.location(Location{"f", 0, 1})
		}}, `storage_data has "w", which state_dict_metadata has not`},
		"path of an object": {form{planner: func(w *metadataWriter) {
			w.op(opEmptyDict, opMark)
			w.text("w")
			w.op(opNone, opTuple1, opSetItems)
		}}, `path of "w" has None as a key`},
		"path as a list": {form{planner: func(w *metadataWriter) {
			w.op(opEmptyDict, opMark)
			w.text("w")
			w.op(opEmptyList, opSetItems)
		}}, `path of "w" is a list`},
		"planner data of a planner": {form{planner: func(w *metadataWriter) { w.op(opEmptyList) }}, "planner_data: want a dict, got a list"},
		"storage_meta of a class":   {form{meta: func(w *metadataWriter) { w.begin(classIndex); w.end() }}, "storage_meta: want an object of StorageMeta"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ReadMetadata(c.form.pickle())
			wantFormatError(t, err, c.want)
			wantFormatError(t, err, "read metadata: .metadata: offset ")
		})
	}
	for _, dtype := range otherDTypes {
		m, err := ReadMetadata(properties(dtype, classMemFormat, 0).pickle())
		if err != nil {
			t.Fatal(err)
		}
		if slices.ContainsFunc(m.Tensors, func(x Tensor) bool { return x.FQN == "w" }) {
			t.Errorf("%s: w is among the tensors", dtype)
		}
		if !slices.ContainsFunc(m.Values, func(v Value) bool { return v.FQN == "w" && v.Where.Length > 0 }) {
			t.Errorf("%s: w is not among the values %v", dtype, m.Values)
		}
	}
}

func TestWritersRefuse(t *testing.T) {
	good := func() Metadata {
		m, err := ReadMetadata(form{}.pickle())
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	for name, change := range map[string]func(*Metadata){
		"no name":          func(m *Metadata) { m.Values[0].FQN = "" },
		"name not UTF-8":   func(m *Metadata) { m.Values[0].FQN = "\xff" },
		"name twice":       func(m *Metadata) { m.Values[0].FQN = "w" },
		"file outside":     func(m *Metadata) { m.Values[0].Where.File = "../f" },
		"file not UTF-8":   func(m *Metadata) { m.Values[0].Where.File = "\xff" },
		"chunk's file":     func(m *Metadata) { m.Tensors[0].Chunks[0].Where.File = "/f" },
		"chunk not UTF-8":  func(m *Metadata) { m.Tensors[0].Chunks[0].Where.File = "\xff" },
		"dtype":            func(m *Metadata) { m.Tensors[0].DType = 0 },
		"shape":            func(m *Metadata) { m.Tensors[0].Shape[0] = -1 },
		"chunk outside":    func(m *Metadata) { m.Tensors[0].Chunks[0].Box.Sizes[0] = 5 },
		"chunk twice":      func(m *Metadata) { m.Tensors[0].Chunks = append(m.Tensors[0].Chunks, m.Tensors[0].Chunks[0]) },
		"empty path":       func(m *Metadata) { m.Tensors[0].Path = []any{} },
		"negative index":   func(m *Metadata) { m.Tensors[0].Path = []any{-1} },
		"path of floats":   func(m *Metadata) { m.Tensors[0].Path = []any{1.5} },
		"path too long":    func(m *Metadata) { m.Values[0].Path = []any{strings.Repeat("k", maxFQN), 1} },
		"path not UTF-8":   func(m *Metadata) { m.Values[0].Path = []any{"\xff"} },
		"ID not UTF-8":     func(m *Metadata) { m.SaveID = "\xff" },
		"version too long": func(m *Metadata) { m.Version = string(make([]byte, 5000)) },
	} {
		m := good()
		change(&m)
		if _, err := WriteMetadata(m); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if _, err := TensorArchive(0, nil); err == nil {
		t.Error("no dtype: no error")
	}
	if _, err := TensorArchive(tensor.Float64, []int64{1 << 60, 2}); err == nil {
		t.Error("2^64 bytes: no error")
	}
	loop := []any{nil}
	loop[0] = loop
	for name, v := range map[string]any{
		"a struct": struct{}{}, "int32": int32(1), "not UTF-8": "\xff", "contains itself": loop,
		"a key twice": Dict{{int64(1), nil}, {1.0, nil}}, "list as a key": Dict{{[]any{}, nil}},
	} {
		if _, err := ValueArchive(v); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
