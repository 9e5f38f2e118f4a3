// Package tensor is a core room whose names are not all explained.
package tensor

import "io/fs"

type Bare struct{ fs.FileInfo }

// Shape is explained.
type Shape []int64

func (s Shape) Volume() int64 { return 1 }

//nolint:unused
func (s *Shape) Reset() {}

func (b bare) String() string { return "" }

type bare int

// These types have one comment between them.
type (
	Box   struct{}
	Shard struct{}
)

// Sizes, explained together.
const (
	Small = 1
	Large = 2
)

const Huge = 3

var Trailing, hidden = 4, 5 // explained at the end of the line

// Sized has one method that is explained here and one that is not.
type Sized interface {
	Size() int // in bytes
	Depth() int
}

func (Shape) Size() int { return 0 }

func (Shape) Depth() int { return 0 }

func (Shape) String() string { return "" }

func Size() {}

// Named has one method, which is explained here.
type Named interface{ Name() string }

func (Shape) Name() string { return "" }
