package dcp_test

import (
	"bytes"
	"errors"
	"reflect"
	"testing"

	"github.com/ckptstore/ckptstore/internal/format/dcp"
)

// Every truncation of a metadata file is an error.
func TestTruncatedMetadata(t *testing.T) {
	for _, dir := range []string{"testdata/torch-2.6/single_nested", "testdata/torch-2.14/single_nested", "testdata/written"} {
		b := load(t, dir)[dcp.MetadataFile]
		for n := range b {
			if _, err := dcp.ReadMetadata(b[:n]); !isFormat(err) {
				t.Fatalf("%s, %d of %d bytes: %v", dir, n, len(b), err)
			}
		}
	}
}

func isFormat(err error) bool {
	var format *dcp.FormatError
	return errors.As(err, &format)
}

// A metadata file has no sum. A changed byte may thus pass where no other part records the
// same: in version, save ID, paths and requires_grad. Anywhere else it is an error, here or
// when the archives are read.
func TestEveryByteOfMetadata(t *testing.T) {
	for _, dir := range []string{"testdata/torch-2.6/single_nested", "testdata/written"} {
		all := load(t, dir)
		b := all[dcp.MetadataFile]
		good, err := dcp.ReadMetadata(b)
		if err != nil {
			t.Fatal(err)
		}
		want, err := all.assemble(good)
		if err != nil {
			t.Fatal(err)
		}
		outcomes := map[string]int{}
		for i := range b {
			for _, flip := range []byte{0x01, 0xff} {
				b[i] ^= flip
				m, err := dcp.ReadMetadata(b)
				b[i] ^= flip
				switch {
				case err != nil && !isFormat(err):
					t.Fatalf("%s, byte %d: %v", dir, i, err)
				case err != nil:
					outcomes["error"]++
				case reflect.DeepEqual(m, good):
					outcomes["identical"]++
				case reflect.DeepEqual(soft(m), soft(good)):
					outcomes["changed in what nothing repeats"]++
				default:
					got, err := all.assemble(m)
					for _, v := range m.Values {
						if _, bad := all.value(v); bad != nil {
							err = bad
						}
					}
					if err == nil && (!reflect.DeepEqual(got, want) || !reflect.DeepEqual(soft(m), soft(good))) {
						t.Fatalf("%s, byte %d xor %02x passes unseen: %+v", dir, i, flip, m)
					}
					outcomes["contradicts the archives"]++
				}
			}
		}
		t.Logf("%s: %v", dir, outcomes)
	}
}

// soft returns m without the parts that a file records once.
func soft(m dcp.Metadata) dcp.Metadata {
	m.Version, m.SaveID = "", ""
	m.Tensors = append([]dcp.Tensor(nil), m.Tensors...)
	m.Values = append([]dcp.Value(nil), m.Values...)
	for i := range m.Tensors {
		m.Tensors[i].Path, m.Tensors[i].RequiresGrad = nil, false
	}
	for i := range m.Values {
		m.Values[i].Path = nil
	}
	return m
}

// Every truncation of an archive, and every changed byte, is an error or
// gives the same payload: the sum of the storage is then the caller's check.
func TestEveryByteOfAnArchive(t *testing.T) {
	for _, dir := range []string{"testdata/torch-2.6/single_nested", "testdata/torch-2.14/single_nested", "testdata/written"} {
		all := load(t, dir)
		m, err := dcp.ReadMetadata(all[dcp.MetadataFile])
		if err != nil {
			t.Fatal(err)
		}
		where := m.Tensors[0].Chunks[0].Where
		b := all[where.File]
		want, err := dcp.ReadArchive(bytes.NewReader(b), where)
		if err != nil {
			t.Fatal(err)
		}
		for n := range where.Length {
			short := where
			short.Length = n
			if _, err := dcp.ReadArchive(bytes.NewReader(b), short); !isFormat(err) {
				t.Fatalf("%s: %d of %d bytes: %v", dir, n, where.Length, err)
			}
			if _, err := dcp.ReadArchive(bytes.NewReader(b[:where.Offset+n]), where); !isFormat(err) {
				t.Fatalf("%s: file of %d bytes: %v", dir, where.Offset+n, err)
			}
		}
		errs := 0
		for i := where.Offset; i < where.Offset+where.Length; i++ {
			for _, flip := range []byte{0x01, 0xff} {
				b[i] ^= flip
				got, err := dcp.ReadArchive(bytes.NewReader(b), where)
				b[i] ^= flip
				if err != nil {
					errs++
				}
				if err != nil && !isFormat(err) || err == nil && !reflect.DeepEqual(got, want) {
					t.Fatalf("%s: byte %d xor %02x: %+v, %v", dir, i, flip, got, err)
				}
			}
		}
		t.Logf("%s: %d of %d changes are errors", dir, errs, 2*where.Length)
	}
}

// A value carries its sum: whatever decodes is what was saved.
func TestEveryByteOfAValue(t *testing.T) {
	all := load(t, "testdata/written")
	m, err := dcp.ReadMetadata(all[dcp.MetadataFile])
	if err != nil {
		t.Fatal(err)
	}
	where := m.Values[1].Where
	b := all[where.File][where.Offset : where.Offset+where.Length]
	want, err := dcp.DecodeValue(b)
	if err != nil {
		t.Fatal(err)
	}
	for i := range b {
		if _, err := dcp.DecodeValue(b[:i]); !isFormat(err) {
			t.Fatalf("%d of %d bytes: %v", i, len(b), err)
		}
		for _, flip := range []byte{0x01, 0xff} {
			b[i] ^= flip
			got, err := dcp.DecodeValue(b)
			b[i] ^= flip
			if err != nil && !isFormat(err) || err == nil && !reflect.DeepEqual(got, want) {
				t.Fatalf("byte %d xor %02x: %v, %v", i, flip, got, err)
			}
		}
	}
}
