package checkpoint

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Ref is the place of a checkpoint's files below the data directory: the names of
// three nested directories, which are safe as file names. [RefOf] makes one from any
// names.
type Ref struct {
	Run        string
	Trial      string
	Checkpoint string
}

// RefOf returns the place of the files of a checkpoint ID. Different names give
// different directories.
func RefOf(run, trial, checkpoint string) Ref {
	return Ref{Run: fileName(run), Trial: fileName(trial), Checkpoint: fileName(checkpoint)}
}

// fileName converts any name to a file name: letters, digits, "-", "_" and dots that do not
// come first stay, every other byte becomes %XX.
func fileName(name string) string {
	var b strings.Builder
	for i := range len(name) {
		switch c := name[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_', c == '.' && i > 0:
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

// Names is the inverse of [RefOf]. Of a reference that RefOf did not make, it may return the
// names of the directories.
func (r Ref) Names() (run, trial, checkpoint string) {
	return nameOfFile(r.Run), nameOfFile(r.Trial), nameOfFile(r.Checkpoint)
}

// nameOfFile is the inverse of fileName.
func nameOfFile(file string) string {
	var b strings.Builder
	for i := 0; i < len(file); i++ {
		if file[i] == '%' && i+2 < len(file) {
			if c, err := strconv.ParseUint(file[i+1:i+3], 16, 8); err == nil {
				b.WriteByte(byte(c))
				i += 2
				continue
			}
		}
		b.WriteByte(file[i])
	}
	return b.String()
}

// String returns the path of the checkpoint below the root.
func (r Ref) String() string { return r.Run + "/" + r.Trial + "/" + r.Checkpoint }

// maxName is the length in bytes of the longest name that common filesystems accept.
const maxName = 255

// Validate returns an error for an empty or invalid name, or a name that leads out of the
// root.
func (r Ref) Validate() error {
	for _, part := range []struct{ what, name string }{
		{"run", r.Run}, {"trial", r.Trial}, {"checkpoint", r.Checkpoint},
	} {
		if err := ValidateName(part.name); err != nil {
			return fmt.Errorf("checkpoint reference %q: %s: %w", r.String(), part.what, err)
		}
	}
	return nil
}

// ValidateName returns an error unless name is that of a file in a directory.
func ValidateName(name string) error {
	switch {
	case name == "":
		return errors.New("empty name")
	case name == "." || name == "..":
		return fmt.Errorf("name %q is not that of a file", name)
	case strings.ContainsAny(name, "/\x00"):
		return fmt.Errorf("name %q has a separator or NUL", name)
	case len(name) > maxName:
		return fmt.Errorf("name of %d bytes, at most %d are allowed", len(name), maxName)
	}
	return nil
}
