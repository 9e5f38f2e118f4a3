package scan

import (
	"bytes"
	"errors"
	"io"
	"slices"
	"testing"
	"testing/iotest"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/crc32c"
	"pgregory.net/rapid"
)

// scanSizes are sizes around the ends of blocks and windows.
var scanSizes = []int{0, 1, checkpoint.BlockSize - 1, checkpoint.BlockSize, checkpoint.BlockSize + 1, WindowSize - 1, WindowSize, WindowSize + 1, 2*WindowSize + 3}

// scanned returns bytes of a size, that differ from window to window.
func scanned(size int) []byte {
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(i>>16 + i)
	}
	return data
}

// TestScan gives every byte from lo to hi once and in order, and tells where a source
// that is too short ends.
func TestScan(t *testing.T) {
	for _, size := range scanSizes {
		data := scanned(size + 10)
		var got []byte
		n, err := Windows(t.Context(), bytes.NewReader(data), 7, int64(7+size), func(window []byte, at int64) error {
			if at != int64(7+len(got)) || len(window) > WindowSize {
				t.Fatalf("%d bytes: a window of %d at %d after %d", size, len(window), at, len(got))
			}
			got = append(got, window...)
			return nil
		})
		if err != nil || n != int64(size) || !bytes.Equal(got, data[7:7+size]) {
			t.Errorf("%d bytes: %d scanned, %v", size, n, err)
		}
		if size == 0 {
			continue
		}
		nothing := func([]byte, int64) error { return nil }
		n, err = Windows(t.Context(), bytes.NewReader(data[:size]), 0, int64(size+1), nothing)
		short := ShortOf(err)
		if short == nil || !short.Ends() || short.At != int64(size) || n != int64(size) || !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%d bytes of %d: %d scanned, %v", size, size+1, n, err)
		}
	}
}

// failing is a source that cannot be read from an offset on.
type failing struct {
	data []byte
	at   int
}

// ReadAt implements io.ReaderAt.
func (f failing) ReadAt(p []byte, off int64) (int, error) {
	n, err := bytes.NewReader(f.data[:f.at]).ReadAt(p, min(off, int64(f.at)))
	if err != nil {
		err = iotest.ErrTimeout
	}
	return n, err
}

// TestScanFails distinguishes an unreadable source from a source that ends.
func TestScanFails(t *testing.T) {
	data := scanned(2 * WindowSize)
	for _, at := range []int{0, 1, WindowSize - 1, WindowSize, WindowSize + 1} {
		_, err := Windows(t.Context(), failing{data, at}, 0, int64(len(data)), func([]byte, int64) error { return nil })
		if short := ShortOf(err); short == nil || short.Ends() || short.At != int64(at) || !errors.Is(err, iotest.ErrTimeout) {
			t.Errorf("failure at %d: %v", at, err)
		}
	}
}

// TestDamagedBlocks flips bytes in blocks of a window, and finds just those blocks.
func TestDamagedBlocks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.SampledFrom(scanSizes).Draw(t, "size")
		window := scanned(min(size, WindowSize))
		d := NewDigester(int64(len(window)))
		defer d.Free()
		for rest := window; len(rest) > 0; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "step")
			d.Add(rest[:n])
			rest = rest[n:]
		}
		digest, sums := d.End()
		if digest != checkpoint.Sum(window) || len(sums) != int(checkpoint.Blocks(int64(len(window)))) {
			t.Fatalf("digest %s and %d sums of %d bytes", digest, len(sums), len(window))
		}
		if k, _ := DamagedBlock(window, sums); k >= 0 {
			t.Fatalf("block %d is right", k)
		}
		var want []int
		for block := range sums {
			if rapid.Bool().Draw(t, "flip") {
				lo := block * checkpoint.BlockSize
				window[rapid.IntRange(lo, min(lo+checkpoint.BlockSize, len(window))-1).Draw(t, "at")] ^= 1
				want = append(want, block)
			}
		}
		var got []int
		DamagedBlocks(window, sums, func(block int, crc uint32) {
			lo := block * checkpoint.BlockSize
			if crc != crc32c.Checksum(window[lo:min(lo+checkpoint.BlockSize, len(window))]) {
				t.Errorf("block %d: another checksum", block)
			}
			got = append(got, block)
		})
		if !slices.Equal(got, want) {
			t.Fatalf("damaged blocks %v, want %v", got, want)
		}
	})
}
