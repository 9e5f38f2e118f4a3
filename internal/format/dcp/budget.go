package dcp

import "fmt"

const (
	copiedPerByte = 16       // bytes of copies for each byte of a .metadata file
	copiedAlways  = 64 << 10 // bytes of copies for a file of any size
)

// budget limits what the reader copies. A pickle refers in two bytes to an
// object that it has built before, so a small file can ask for many copies of a
// large object. Files of PyTorch need less than two bytes of copies a byte.
type budget struct {
	left int64 // bytes that may still be copied
	size int64 // bytes of the file, for the message
}

func newBudget(size int) budget {
	return budget{left: copiedAlways + copiedPerByte*int64(size), size: int64(size)}
}

// spend charges the copy of n bytes. It fails once the copies exceed the
// budget.
func (b *budget) spend(n int) error {
	if b.left -= int64(n); b.left < 0 {
		return fmt.Errorf("the same objects stand in too many places: their copies exceed the limit of %d bytes for a file of %d", copiedAlways+copiedPerByte*b.size, b.size)
	}
	return nil
}
