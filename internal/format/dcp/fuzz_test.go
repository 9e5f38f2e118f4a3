package dcp

import (
	"archive/zip"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

// seeds gives each fixture's metadata and archives to f.
func seeds(f *testing.F, metadata func([]byte), archive func([]byte)) {
	f.Helper()
	names, err := filepath.Glob("testdata/*/*/" + MetadataFile)
	if err != nil || len(names) == 0 {
		f.Fatalf("no fixtures: %v", err)
	}
	for _, name := range append(names, "testdata/written/"+MetadataFile) {
		data, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		m, err := ReadMetadata(data)
		if err != nil {
			f.Fatal(err)
		}
		metadata(data)
		var all []Location
		for _, v := range m.Values {
			all = append(all, v.Where)
		}
		for _, t := range m.Tensors {
			for _, c := range t.Chunks {
				all = append(all, c.Where)
			}
		}
		for _, where := range all {
			file, err := os.ReadFile(filepath.Join(filepath.Dir(name), where.File))
			if err != nil {
				f.Fatal(err)
			}
			archive(file[where.Offset : where.Offset+where.Length])
		}
	}
}

// inner is data.pkl of an archive. Sums keep a fuzzer out of it, so pickles
// are fuzzed for themselves, too.
func inner(f *testing.F, archive []byte) []byte {
	f.Helper()
	z, err := zip.NewReader(bytes.NewReader(archive), int64(len(archive)))
	if err != nil {
		f.Fatal(err)
	}
	r, err := z.Open("archive/data.pkl")
	if err != nil {
		f.Fatal(err)
	}
	b, err := io.ReadAll(r)
	if err != nil {
		f.Fatal(err)
	}
	return b
}

func known(err error) bool {
	var format *FormatError
	var opaque *OpaqueError
	return errors.As(err, &format) || errors.As(err, &opaque)
}

// Any metadata that can be read can be written, and reads back equal.
func FuzzMetadata(f *testing.F) {
	seeds(f, func(b []byte) { f.Add(b) }, func([]byte) {})
	f.Add(form{}.pickle())
	f.Add(newBomb(4).paths())
	f.Add(form{properties: func(w *metadataWriter) { w.properties(legacyProperties, legacyMemFormat, "float32", 2, true) }}.pickle())
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := ReadMetadata(b)
		if err != nil {
			if !known(err) {
				t.Fatal(err)
			}
			return
		}
		again, err := WriteMetadata(m)
		if err != nil {
			t.Fatalf("%+v is read and not written: %v", m, err)
		}
		got, err := ReadMetadata(again)
		if err != nil || !reflect.DeepEqual(got, m) {
			t.Fatalf("read %+v, %v, wrote %+v", got, err, m)
		}
	})
}

// A payload lies in its archive, and its elements in the payload. The input
// is an archive, and the pickle of another.
func FuzzArchive(f *testing.F) {
	seeds(f, func([]byte) {}, func(b []byte) { f.Add(b); f.Add(inner(f, b)) })
	f.Fuzz(func(t *testing.T, b []byte) {
		around := forged(forge{"data.pkl", b}, forge{"data/0", make([]byte, 96)}, forge{"version", []byte("3\n")})
		for _, b := range [][]byte{b, around} {
			// Junk in front of the archive must not matter.
			file := append([]byte("front"), b...)
			p, err := ReadArchive(bytes.NewReader(file), Location{File: "f", Offset: 5, Length: int64(len(b))})
			if err != nil {
				if !known(err) {
					t.Fatal(err)
				}
				continue
			}
			lo, n := p.Range()
			if p.Offset < 5 || p.Length < 0 || p.Offset+p.Length > int64(len(file)) || lo < p.Offset || lo+n > p.Offset+p.Length {
				t.Fatalf("%+v with the range %d+%d is not within %d bytes", p, lo, n, len(file))
			}
			if size := p.Volume() * int64(p.DType.Size()); size <= 1<<16 {
				p.Gather(make([]byte, size), file[p.Offset:p.Offset+p.Length])
			} else if p.Contiguous() {
				t.Fatalf("%+v is contiguous and larger than its file", p)
			}
		}
	})
}

// A decoded value can be written, and is then decoded the same. The input is
// an archive, and the pickle of another.
func FuzzValue(f *testing.F) {
	seeds(f, func([]byte) {}, func(b []byte) { f.Add(b); f.Add(inner(f, b)) })
	f.Add(laughs(3))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, b := range [][]byte{b, wholeArchive(b)} {
			v, err := DecodeValue(b)
			if err != nil {
				if !known(err) {
					t.Fatal(err)
				}
				continue
			}
			once, err := ValueArchive(v)
			if err != nil {
				t.Fatalf("%#v is decoded and not written: %v", v, err)
			}
			got, err := DecodeValue(once)
			if err != nil {
				t.Fatal(err)
			}
			twice, err := ValueArchive(got)
			if err != nil || !bytes.Equal(once, twice) {
				t.Fatalf("%#v, written and read, is %#v; %v", v, got, err)
			}
		}
	})
}
