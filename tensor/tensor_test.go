package tensor_test

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/tensor"
	"pgregory.net/rapid"
)

func wantError(t *testing.T, err error, parts ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("no error, want one with %q", parts)
		return
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error %q lacks %q", err, part)
		}
	}
}

func TestShapeValidate(t *testing.T) {
	for name, c := range map[string]struct {
		shape tensor.Shape
		bad   string
	}{
		"scalar":              {nil, ""},
		"empty":               {tensor.Shape{0, 5}, ""},
		"most dimensions":     {make(tensor.Shape, tensor.MaxDims), ""},
		"too many dimensions": {make(tensor.Shape, tensor.MaxDims+1), "65 dimensions, at most 64"},
		"negative":            {tensor.Shape{4, -1}, "dimension 1 is negative"},
		"largest":             {tensor.Shape{math.MaxInt64}, ""},
		"largest product":     {tensor.Shape{1 << 31, 1<<32 - 1}, ""},
		"overflow":            {tensor.Shape{1 << 31, 1 << 32}, "more than 2^63"},
		"overflow to zero":    {tensor.Shape{1 << 32, 1 << 32}, "more than 2^63"},
		"overflow behind 0":   {tensor.Shape{0, 1 << 32, 1 << 32}, "more than 2^63"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := c.shape.Validate(); c.bad != "" {
				wantError(t, err, c.bad)
			} else if err != nil {
				t.Error(err)
			}
		})
	}
}

func TestBoxValidate(t *testing.T) {
	shape := tensor.Shape{4, 8}
	for name, c := range map[string]struct {
		box tensor.Box
		bad string
	}{
		"whole":             {shape.Full(), ""},
		"empty at the end":  {box([]int64{4, 8}, []int64{0, 0}), ""},
		"beyond the end":    {box([]int64{5, 0}, []int64{0, 8}), "out of bounds of shape [4 8] in dimension 0"},
		"too long":          {box([]int64{0, 4}, []int64{4, 5}), "in dimension 1"},
		"negative offset":   {box([]int64{-1, 0}, []int64{1, 8}), "in dimension 0"},
		"negative size":     {box([]int64{0, 3}, []int64{4, -1}), "in dimension 1"},
		"sum overflows":     {box([]int64{2, 0}, []int64{math.MaxInt64, 8}), "in dimension 0"},
		"too few":           {box([]int64{0}, []int64{4}), "has not the 2 dimensions"},
		"offsets only":      {box([]int64{0, 0}, nil), "has not the 2 dimensions"},
		"one size too many": {box([]int64{0, 0}, []int64{4, 8, 1}), "has not the 2 dimensions"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := c.box.Validate(shape); c.bad != "" {
				wantError(t, err, c.bad, c.box.String())
			} else if err != nil {
				t.Error(err)
			}
		})
	}
}

func TestShardValidate(t *testing.T) {
	good := tensor.Shard{FQN: "model.w", DType: tensor.BFloat16, Global: tensor.Shape{4, 8}, Box: box([]int64{2, 0}, []int64{2, 8})}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	if got := good.Bytes(); got != 32 {
		t.Errorf("the shard has %d bytes, want 32", got)
	}
	scalar := tensor.Shard{FQN: "step", DType: tensor.Int64}
	if err := scalar.Validate(); err != nil || scalar.Bytes() != 8 {
		t.Errorf("a scalar has %d bytes, want 8; %v", scalar.Bytes(), err)
	}
	for bad, change := range map[string]func(*tensor.Shard){
		"without a name":            func(s *tensor.Shard) { s.FQN = "" },
		"invalid dtype":             func(s *tensor.Shard) { s.DType = 0 },
		"invalid dtype ":            func(s *tensor.Shard) { s.DType = tensor.Float8E5M2FNUZ + 1 },
		"dimension 0 is negative":   func(s *tensor.Shard) { s.Global = tensor.Shape{-4, 8} },
		"more than 2^63 bytes":      func(s *tensor.Shard) { s.Global = tensor.Shape{1 << 62}; s.Box = s.Global.Full() },
		"is out of bounds of shape": func(s *tensor.Shard) { s.Box.Offsets = []int64{3, 0} },
		"has not the 2 dimensions":  func(s *tensor.Shard) { s.Box = tensor.Box{} },
	} {
		t.Run(bad, func(t *testing.T) {
			s := good
			change(&s)
			err := s.Validate()
			wantError(t, err, bad)
			if s.FQN != "" {
				wantError(t, err, `tensor "model.w"`)
			}
		})
	}
}

// Sizes that pass validation do not overflow.
func TestValidShardsDoNotOverflow(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dim := rapid.OneOf(rapid.Int64Range(0, 9), rapid.Int64(), rapid.SampledFrom([]int64{1 << 31, 1 << 32, 1 << 62, math.MaxInt64}))
		n := rapid.IntRange(0, 4).Draw(t, "dimensions")
		list := rapid.SliceOfN(dim, n, n)
		s := tensor.Shard{
			FQN: "w", DType: tensor.DType(rapid.Uint8Range(1, 19).Draw(t, "dtype")),
			Global: list.Draw(t, "shape"), Box: box(list.Draw(t, "offsets"), list.Draw(t, "sizes")),
		}
		if s.Validate() != nil {
			return
		}
		whole := s.Global.Volume()
		if whole < 0 || s.Box.Volume() < 0 || s.Box.Volume() > whole || s.Bytes() < 0 || s.Bytes() > whole*int64(s.DType.Size()) {
			t.Fatalf("%+v has %d of %d elements and %d bytes", s, s.Box.Volume(), whole, s.Bytes())
		}
		for d := range s.Box.Sizes {
			if end := s.Box.Offsets[d] + s.Box.Sizes[d]; end < 0 || end > s.Global[d] {
				t.Fatalf("%+v ends at %d in dimension %d", s, end, d)
			}
		}
	})
}

// The numbers and names are in files that exist: they are spelled out here so
// that a change is seen.
func TestDTypes(t *testing.T) {
	want := map[tensor.DType]string{
		1: "bool 1", 2: "uint8 1", 3: "int8 1", 4: "uint16 2", 5: "int16 2", 6: "uint32 4", 7: "int32 4", 8: "uint64 8", 9: "int64 8",
		10: "float16 2", 11: "bfloat16 2", 12: "float32 4", 13: "float64 8", 14: "complex32 4", 15: "complex64 8", 16: "complex128 16",
		17: "float8_e4m3fn 1", 18: "float8_e5m2 1", 19: "float8_e8m0fnu 1", 20: "float8_e4m3fnuz 1", 21: "float8_e5m2fnuz 1",
	}
	for n := range 256 {
		d := tensor.DType(n)
		if !d.Valid() {
			if want[d] != "" {
				t.Errorf("dtype %d is not valid, it was %s", n, want[d])
			}
			if got := fmt.Sprint(d, d.Size()); got != fmt.Sprintf("dtype(%d) 0", n) {
				t.Errorf("invalid dtype %d is %q", n, got)
			}
			if _, err := d.MarshalText(); err == nil {
				t.Errorf("invalid dtype %d was written as text", n)
			}
			continue
		}
		if got := fmt.Sprint(d.String(), " ", d.Size()); got != want[d] {
			t.Errorf("dtype %d is %q, want %q", n, got, want[d])
		}
		if got, err := tensor.ParseDType(d.String()); err != nil || got != d {
			t.Errorf("%q is read as %d, %v", d.String(), got, err)
		}
		data, err := json.Marshal(map[string]tensor.DType{"dtype": d})
		var back map[string]tensor.DType
		if err != nil || json.Unmarshal(data, &back) != nil || back["dtype"] != d || !strings.Contains(string(data), `"`+d.String()+`"`) {
			t.Errorf("%v in JSON is %s and comes back as %v, %v", d, data, back, err)
		}
	}
	for _, bad := range []string{"", "float31", "Float32", "torch.float32", "float32 "} {
		var d tensor.DType
		wantError(t, d.UnmarshalText([]byte(bad)), "unknown dtype", fmt.Sprintf("%q", bad))
	}
}

func TestFullCoversTheShape(t *testing.T) {
	shape := tensor.Shape{4, 0, 2}
	full := shape.Full()
	if err := full.Validate(shape); err != nil || !full.Empty() || full.Volume() != 0 {
		t.Errorf("%v: %v", full, err)
	}
	full.Sizes[0] = 9
	if shape[0] != 4 {
		t.Error("the box shares memory with the shape")
	}
	if !shape.Equal(tensor.Shape{4, 0, 2}) || shape.Equal(tensor.Shape{4, 0}) {
		t.Error("equality of shapes")
	}
}
