package archtest

import (
	"fmt"
	"go/token"
	"io/fs"
	"path"
	"slices"
	"strconv"
)

// Unused lists the rights of the law that no file of tree makes use of, as
// "room A may import B", in the order of the law.
func Unused(tree fs.FS, law Law) ([]string, error) {
	c := &checker{law: law, fset: token.NewFileSet()}
	dirs, err := c.parse(tree)
	if err != nil {
		return nil, fmt.Errorf("check architecture: %w", err)
	}
	used := map[[2]string]bool{}
	for dir, files := range dirs {
		from := law.room(dir)
		if from == nil {
			continue
		}
		for _, file := range files {
			for _, spec := range file.Imports {
				target, err := strconv.Unquote(spec.Path.Value)
				if err != nil {
					continue // the parser has refused such a file already
				}
				if rest, ours := below(target, law.Module); ours {
					if to := law.room(path.Join(".", rest)); to != nil {
						used[[2]string{from.Path, to.Path}] = true
					}
				}
			}
		}
	}
	var unused []string
	for _, room := range law.Rooms {
		if slices.Contains(room.May, Any) {
			continue
		}
		for _, to := range room.May {
			if !used[[2]string{room.Path, to}] {
				unused = append(unused, fmt.Sprintf("room %s may import %s", room.Path, to))
			}
		}
	}
	return unused, nil
}
