package filesystem

import (
	"regexp"
	"strconv"
	"strings"

	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
)

// scheme is the prefix of a URL. Requests have paths without it.
const scheme = "ckptstore://"

// partMark separates part and name in a checkpoint's name.
const partMark = "~"

// The names of DCP's own files.
const (
	metadataFile = ".metadata"
	metadataTemp = ".metadata.tmp"
	dataSuffix   = ".distcp"
	tempSuffix   = ".tmp"
)

// target is a checkpoint by its name.
type target struct{ run, name string }

// path is the parsed path of a request.
type path struct {
	text  string
	run   string
	parts []string // at most three
}

// parse splits a path: RUN, and at most three names below it.
func parse(text string) (path, error) {
	text = strings.Trim(strings.TrimPrefix(text, scheme), "/")
	all := strings.Split(text, "/")
	p := path{text: text, run: all[0], parts: all[1:]}
	if err := store.ValidRun(p.run); err != nil {
		return p, refused("%s%s: run %q: %w", scheme, text, p.run, err)
	}
	for _, part := range p.parts {
		if part == "" || part == "." || part == ".." {
			return p, refused("%s%s: %q is no name", scheme, text, part)
		}
	}
	if len(p.parts) > 3 {
		return p, refused("%s%s: a checkpoint is %sRUN[/PART]/NAME, with files directly in it", scheme, text, scheme)
	}
	return p, nil
}

// checkpoint returns the path as a checkpoint's.
func (p path) checkpoint() (target, bool) {
	if len(p.parts) == 0 || len(p.parts) > 2 {
		return target{}, false
	}
	return target{p.run, strings.Join(p.parts, partMark)}, true
}

// file returns the path as that of a file in a checkpoint.
func (p path) file() (target, string, bool) {
	n := len(p.parts) - 1
	if n < 1 {
		return target{}, "", false
	}
	return target{p.run, strings.Join(p.parts[:n], partMark)}, p.parts[n], true
}

// idForm is the end of an ID that [planner.CheckpointID] makes of a name.
var idForm = regexp.MustCompile(`\.a[0-9]{1,9}(\.[0-9]+)?$`)

// written returns the path as that of a file to write.
func (p path) written() (target, string, error) {
	to, name, ok := p.file()
	if !ok {
		return to, name, refused("%s%s: a file lies in a checkpoint, %sRUN[/PART]/NAME/FILE", scheme, p.text, scheme)
	}
	if _, _, file := projections.SplitFile(to.name); file {
		return to, name, refused("%s%s: %s stands between a directory and a file in the names of checkpoints: give it another name", scheme, p.text, projections.FileMark)
	}
	if err := planner.ValidName(to.name); err != nil {
		return to, name, refused("%s%s: %w", scheme, p.text, err)
	}
	if idForm.MatchString(to.name) {
		return to, name, refused("%s%s: %q has the form of a checkpoint's ID, which the store assigns: give it another name", scheme, p.text, to.name)
	}
	if err := data.PendingName(name); err != nil {
		return to, name, refused("%s%s: %w", scheme, p.text, err)
	}
	return to, name, nil
}

// dirOf returns the path of a checkpoint below its run.
func dirOf(name string) string {
	dir, file, ok := projections.SplitFile(name)
	dir = strings.Replace(dir, partMark, "/", 1)
	if ok {
		dir += "/" + file
	}
	return dir
}

// alone returns the single-file checkpoint of a file in this directory.
func (t target) alone(file string) target { return target{t.run, projections.FileName(t.name, file)} }

// below returns the path below its run; "" for the run itself.
func (p path) below() string { return strings.Join(p.parts, "/") }

// is reports whether the path equals one below the run. PART/NAME and PART~NAME
// are equal.
func (p path) is(at string) bool { return plainPath(at) == plainPath(p.below()) }

// holds reports whether a path below the run equals this one or lies below it.
func (p path) holds(at string) bool {
	return len(p.parts) == 0 || p.is(at) || strings.HasPrefix(plainPath(at), plainPath(p.below())+partMark)
}

func plainPath(at string) string { return strings.ReplaceAll(at, "/", partMark) }

var stepText = regexp.MustCompile(`(?i)step[-_= ]?([0-9]{1,18})`)

// stepOf returns the training step in a name: the number after the last "step",
// or else the previous checkpoint's step.
func stepOf(name string, before int64) int64 {
	if all := stepText.FindAllStringSubmatch(name, -1); all != nil {
		if n, err := strconv.ParseInt(all[len(all)-1][1], 10, 64); err == nil {
			return n
		}
	}
	return before
}
