package launch

import (
	"os"
	"path/filepath"

	"github.com/ckptstore/ckptstore/internal/session"
)

// Bounded returns a store whose staging directories each have room for a number
// of bytes.
func Bounded(s session.Store, bytes int64) session.Store {
	s.Room = func(file *os.File) (int64, error) {
		files, err := os.ReadDir(filepath.Dir(file.Name()))
		if err != nil {
			return 0, err
		}
		left := bytes
		for _, f := range files {
			info, err := f.Info()
			if os.IsNotExist(err) {
				continue
			}
			if err != nil {
				return 0, err
			}
			left -= info.Size()
		}
		return max(left, 0), nil
	}
	return s
}
