package digits

import (
	"bufio"
	"bytes"
	"compress/gzip"
	_ "embed"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
)

const (
	inputs  = 64
	classes = 10

	imageCount = 1797
	maxPixel   = 16
	testEvery  = 5
)

//go:embed digits.csv.gz
var compressed []byte

type image struct {
	pixels [inputs]float32 // 0..1
	label  int
}

type images struct{ train, test []image }

// embedded returns the data in the binary. It panics if the data is damaged, which
// means that the binary is damaged.
var embedded = sync.OnceValue(func() *images {
	data, err := parse(bytes.NewReader(compressed))
	if err != nil {
		panic(fmt.Sprintf("digits: embedded images: %v", err))
	}
	return data
})

// parse reads all images and splits them.
func parse(r io.Reader) (*images, error) {
	plain, err := gzip.NewReader(r)
	if err != nil {
		return nil, fmt.Errorf("decompress: %w", err)
	}
	data := &images{}
	count := 0
	lines := bufio.NewScanner(plain)
	for lines.Scan() {
		one, err := parseLine(lines.Text())
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", count+1, err)
		}
		if count%testEvery == 0 {
			data.test = append(data.test, one)
		} else {
			data.train = append(data.train, one)
		}
		count++
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("line %d: %w", count+1, err)
	}
	if count != imageCount {
		return nil, fmt.Errorf("%d images, want %d", count, imageCount)
	}
	return data, nil
}

func parseLine(line string) (image, error) {
	fields := strings.Split(line, ",")
	if len(fields) != inputs+1 {
		return image{}, fmt.Errorf("%d fields, want %d", len(fields), inputs+1)
	}
	var one image
	for i, field := range fields {
		n, err := strconv.Atoi(field)
		limit := maxPixel
		if i == inputs {
			limit = classes - 1
		}
		if err != nil || n < 0 || n > limit {
			return image{}, fmt.Errorf("field %d is %q, want 0..%d", i+1, field, limit)
		}
		if i < inputs {
			one.pixels[i] = float32(n) / maxPixel
		} else {
			one.label = n
		}
	}
	return one, nil
}
