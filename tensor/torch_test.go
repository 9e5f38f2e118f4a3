package tensor_test

import (
	"bufio"
	"crypto/sha256"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/tensor"
)

// PyTorch converts every element of every small type to the same bits: what
// testdata/torch_convert.py wrote down there is made again here.
func TestConvertLikePyTorch(t *testing.T) {
	file, err := os.Open("testdata/torch_convert.sha256")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	lines, pairs := bufio.NewScanner(file), 0
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if fields[0] == "#" {
			continue
		}
		pairs++
		from, err := tensor.ParseDType(fields[0])
		if err != nil {
			t.Fatal(err)
		}
		to, err := tensor.ParseDType(fields[1])
		if err != nil {
			t.Fatal(err)
		}
		var src []byte
		for c := range uint64(1) << (8 * from.Size()) {
			src = append(src, bytesOf(c, from)...)
		}
		n := len(src) / from.Size()
		got := make([]byte, n*to.Size())
		if err := tensor.Convert(got, to, src, from); err != nil {
			t.Fatal(err)
		}
		for i := 0; i < n && from != to && formats[from].exponent > 0; i++ {
			x := formats[from].decode(uint64(i))
			if math.IsNaN(x) || math.IsInf(x, 0) && to == tensor.Uint32 {
				clear(got[i*to.Size() : (i+1)*to.Size()])
			}
		}
		if sum := fmt.Sprintf("%x", sha256.Sum256(got)); sum != fields[2] {
			t.Errorf("%v to %v: the elements have the digest %s, PyTorch's %s", from, to, sum, fields[2])
		}
	}
	if err := lines.Err(); err != nil || pairs != 8*17 {
		t.Errorf("%d pairs of types, %v", pairs, err)
	}
}
