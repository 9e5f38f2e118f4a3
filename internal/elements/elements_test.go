package elements

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/tensor"
)

func TestParseSlice(t *testing.T) {
	shape := tensor.Shape{10, 4, 6}
	for spec, want := range map[string]string{
		"0:10,:,5":     "[0 0 5]+[10 4 1] (10, 4)",
		"0:2":          "[0 0 0]+[2 4 6] (2, 4, 6)",
		"-1":           "[9 0 0]+[1 4 6] (4, 6)",
		"-3:,1:-1,::1": "[7 1 0]+[3 2 6] (3, 2, 6)",
		"...,0":        "[0 0 0]+[10 4 1] (10, 4)",
		"3,...,2":      "[3 0 2]+[1 4 1] (4)",
		"5:100":        "[5 0 0]+[5 4 6] (5, 4, 6)",
		"8:2,:":        "[8 0 0]+[0 4 6] (0, 4, 6)",
		"-100:1":       "[0 0 0]+[1 4 6] (1, 4, 6)",
		"100:":         "[10 0 0]+[0 4 6] (0, 4, 6)",
		" 1 , 2 , 3 ":  "[1 2 3]+[1 1 1] ()",
		"1,2,3,":       "[1 2 3]+[1 1 1] ()",
		"...":          "[0 0 0]+[10 4 6] (10, 4, 6)",
		":,:,:,...":    "[0 0 0]+[10 4 6] (10, 4, 6)",
		":-100,0,0":    "[0 0 0]+[0 1 1] (0)",
		"-9223372036854775808:9223372036854775807": "[0 0 0]+[10 4 6] (10, 4, 6)",
	} {
		got, err := ParseSlice(spec, shape)
		if err != nil {
			t.Errorf("%s: %v", spec, err)
			continue
		}
		dims := strings.ReplaceAll(strings.Trim(fmt.Sprint([]int64(got.Shape)), "[]"), " ", ", ")
		if text := fmt.Sprintf("%v (%s)", got.Box, dims); text != want {
			t.Errorf("%s: %s, want %s", spec, text, want)
		}
		if err := got.Box.Validate(shape); err != nil {
			t.Errorf("%s: %v", spec, err)
		}
	}
	for spec, want := range map[string]string{
		"": "empty", ",": "empty", "1,,2": "empty", "10": "index 10 is out of bounds of 10", "-11": "out of bounds",
		"::2": "step of 2 is not supported", "::-1": "step of -1", "::0": "step of 0", "1:2:3:4": "START:STOP", "x": "not a whole number",
		"1.5:": "not a whole number", ":,:,:,:": "names 4 dimensions, the tensor has 3", "...,...": "twice", "None": "not a whole number",
	} {
		if got, err := ParseSlice(spec, shape); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, %v, want an error with %q", spec, got, err, want)
		}
	}
	if got, err := ParseSlice("...", nil); err != nil || got.Box.Volume() != 1 {
		t.Errorf("of a scalar: %v, %v", got, err)
	}
}

// TestRangeAsInPython compares ranges with Python's semantics, element by element.
func TestRangeAsInPython(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Int64Range(0, 6).Draw(t, "n")
		start, stop := rapid.Int64Range(-9, 9).Draw(t, "start"), rapid.Int64Range(-9, 9).Draw(t, "stop")
		var want []int64
		for i := range n {
			from, to := start, stop
			if from < 0 {
				from += n
			}
			if to < 0 {
				to += n
			}
			if i >= from && i < to {
				want = append(want, i)
			}
		}
		off, size, keep, err := parseRange(fmt.Sprintf("%d:%d", start, stop), n)
		if err != nil || !keep || size != int64(len(want)) || size > 0 && off != want[0] || off+size > n {
			t.Fatalf("%d:%d of %d is %d+%d, want %v: %v", start, stop, n, off, size, want, err)
		}
	})
}

func TestNPYHeader(t *testing.T) {
	for _, c := range []struct {
		dtype tensor.DType
		shape tensor.Shape
		dict  string
	}{
		{tensor.Float32, tensor.Shape{17, 8}, "{'descr': '<f4', 'fortran_order': False, 'shape': (17, 8), }"},
		{tensor.Bool, tensor.Shape{3}, "{'descr': '|b1', 'fortran_order': False, 'shape': (3,), }"},
		{tensor.Complex128, tensor.Shape{}, "{'descr': '<c16', 'fortran_order': False, 'shape': (), }"},
	} {
		head, err := NPYHeader(c.dtype, c.shape)
		if err != nil {
			t.Fatal(err)
		}
		if len(head)%64 != 0 || !bytes.HasPrefix(head, []byte("\x93NUMPY\x01\x00")) || int(head[8])+int(head[9])<<8 != len(head)-10 {
			t.Errorf("header %q", head)
		}
		if got := string(head[10:]); strings.TrimRight(got, " \n") != c.dict || !strings.HasSuffix(got, "\n") {
			t.Errorf("%q, want %q", got, c.dict)
		}
	}
	for dtype, want := range map[tensor.DType]string{
		tensor.BFloat16: "--format raw for its bytes, or --dtype float32", tensor.Float8E4M3: "--dtype float32", tensor.Complex32: "--dtype complex64",
		tensor.Float8E8M0: "--format raw",
	} {
		if _, err := NPYHeader(dtype, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v", dtype, err)
		}
	}
	if _, err := NPYHeader(tensor.Float8E8M0, nil); strings.Contains(err.Error(), "--dtype") {
		t.Errorf("what cannot be converted: %v", err)
	}
	if _, err := NPYHeader(tensor.Uint8, make(tensor.Shape, 30000)); err == nil {
		t.Error("a header of more than 64 KiB is written as one of version 1.0")
	}
}

func TestText(t *testing.T) {
	for _, c := range []struct {
		dtype tensor.DType
		shape tensor.Shape
		data  []byte
		want  string
	}{
		{tensor.Uint8, tensor.Shape{}, []byte{7}, "7\n"},
		{tensor.Int8, tensor.Shape{3}, []byte{1, 0xff, 3}, "1\n-1\n3\n"},
		{tensor.Bool, tensor.Shape{2, 2}, []byte{0, 1, 1, 0}, "false true\ntrue false\n"},
		{tensor.Uint8, tensor.Shape{2, 2, 1}, []byte{1, 2, 3, 4}, "1\n2\n\n3\n4\n"},
		{tensor.Uint8, tensor.Shape{0, 2}, nil, ""},
		{tensor.Float32, tensor.Shape{1}, []byte{0xcd, 0xcc, 0xcc, 0x3d}, "0.1\n"},
		{tensor.Complex64, tensor.Shape{1}, []byte{0, 0, 0x80, 0x3f, 0, 0, 0, 0x80}, "1-0j\n"},
	} {
		var out bytes.Buffer
		w, err := NewText(&out, c.dtype, c.shape)
		if err != nil {
			t.Fatal(err)
		}
		for len(c.data) > 0 { // an element at a time, as windows may end anywhere
			n := c.dtype.Size()
			if _, err := w.Write(c.data[:n]); err != nil {
				t.Fatal(err)
			}
			c.data = c.data[n:]
		}
		if err := w.End(); err != nil || out.String() != c.want {
			t.Errorf("%v %v: %q, want %q: %v", c.dtype, c.shape, out.String(), c.want, err)
		}
	}
	inf := appendElement(nil, tensor.Complex128, append(make([]byte, 8), 0, 0, 0, 0, 0, 0, 0xf0, 0x7f))
	if string(inf) != "0+Infj" {
		t.Errorf("%s, for 0 and %v", inf, math.Inf(1))
	}
	if _, err := NewText(io.Discard, tensor.Float8E8M0, nil); err == nil {
		t.Error("float8_e8m0fnu has a text")
	}
}
