package projections

import "strings"

// FileMark stands between a directory and a file in the name of a checkpoint that is
// one file by itself.
const FileMark = "~~"

// FileName is the name of the checkpoint that is one file, in a directory that is no
// checkpoint itself.
func FileName(dir, file string) string { return dir + FileMark + file }

// SplitFile takes the name of a checkpoint that is one file apart; false for others.
func SplitFile(name string) (dir, file string, ok bool) {
	dir, file, ok = strings.Cut(name, FileMark)
	if !ok || dir == "" || file == "" {
		return name, "", false
	}
	return dir, file, true
}

// IsFile reports whether the checkpoint is one file by itself. Such a one is in no line:
// nothing resumes from it, and it supersedes nothing.
func (c Checkpoint) IsFile() bool {
	_, _, ok := SplitFile(c.Name)
	return ok
}
