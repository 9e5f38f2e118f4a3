// Package logs keeps the output of a job's workers in files, and reads it.
//
//	Routes   which outputs of which ranks go to the terminal and to files
//	Dir      the files of one job, as they are written
//	File     one output of one rank in one attempt
//	Select   what of a job's files is read
//	Line     a line that was read
//
// The files of a job are
//
//	STORE/logs/<run>/<job>/a<attempt>-r<rank>.out      standard output
//	                       a<attempt>-r<rank>.err      standard error
//	                       a<attempt>-r<rank>.out.1    what came before, see below
//
// where rank is the global one, and each line is
//
//	2026-11-21T23:24:11.123456Z text
//
// with the time at which the trainer received it, in UTC. A line of more than 64
// KiB is kept in pieces. A redrawn line, such as a progress bar, keeps all of its
// states, with "\r" between them. A file that reaches the maximum size is renamed
// to .1, replacing the previous .1, and a new file begins. So a rank's output
// never has more than two files, and the first line of the second reports what
// was dropped.
//
// Output is worth less than training: when a file cannot be written, as on a full
// disk, the job continues without files, and logs this once.
package logs

import (
	"fmt"
	"path"
	"time"
)

// Stream is one of the outputs of a process.
type Stream string

// The outputs, by the suffixes of their files.
const (
	Out Stream = "out"
	Err Stream = "err"
)

// DefaultMaxSize is the size in bytes at which a file is rotated.
const DefaultMaxSize = 64 << 20

// Below returns the directory of a job's output, relative to its store. run is
// the name of the run's directory, as below the store's data.
func Below(run, job string) string { return path.Join("logs", run, job) }

// before is the suffix of the previous file.
const before = ".1"

// layout is the format of a line's time, always 27 bytes.
const layout = "2006-01-02T15:04:05.000000Z"

// key identifies the output in a file.
type key struct {
	attempt, rank int
	stream        Stream
}

func (k key) name() string { return fmt.Sprintf("a%d-r%d.%s", k.attempt, k.rank, k.stream) }

// parseName parses the name of a file. The form must match exactly, or the file
// is not ours.
func parseName(name string) (k key, ok bool) {
	var stream string
	if n, err := fmt.Sscanf(name, "a%d-r%d.%s", &k.attempt, &k.rank, &stream); n != 3 || err != nil {
		return k, false
	}
	k.stream = Stream(stream)
	return k, k.name() == name && (k.stream == Out || k.stream == Err)
}

// parseLine splits the time from a line. It returns false for a line that is not
// ours, such as one cut by a crash.
func parseLine(line []byte) (at time.Time, text []byte, ok bool) {
	if len(line) <= len(layout) || line[len(layout)] != ' ' {
		return at, line, false
	}
	at, err := time.Parse(layout, string(line[:len(layout)]))
	if err != nil {
		return at, line, false
	}
	return at, line[len(layout)+1:], true
}
