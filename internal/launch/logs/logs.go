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
// with the time at which the trainer had it, in UTC. A line of more than 64 KiB
// is kept in pieces; one that is written anew, as by a progress bar, has all of
// its states, with "\r" between them. A file that has reached its greatest size is renamed to
// .1, over the one that was there, and begun anew: a rank's output never has
// more than two files, and the first line of the second says what is dropped.
//
// Output is worth less than training: when a file cannot be written, as on a
// full disk, the job goes on without files, and says so once.
package logs

import (
	"fmt"
	"path"
	"time"
)

// Stream is one of the outputs of a process.
type Stream string

// The outputs, by the endings of their files.
const (
	Out Stream = "out"
	Err Stream = "err"
)

// DefaultMaxSize is the size in bytes at which a file is begun anew.
const DefaultMaxSize = 64 << 20

// Below is the directory of a job's output below that of its store. run is the
// name of the run's directory, as below the store's data.
func Below(run, job string) string { return path.Join("logs", run, job) }

// before is the ending of the file that came before.
const before = ".1"

// layout is that of a line's time, always 27 bytes.
const layout = "2006-01-02T15:04:05.000000Z"

// key says whose output a file has.
type key struct {
	attempt, rank int
	stream        Stream
}

func (k key) name() string { return fmt.Sprintf("a%d-r%d.%s", k.attempt, k.rank, k.stream) }

// parseName is the key of a file. Its form is exact, or the file is not ours.
func parseName(name string) (k key, ok bool) {
	var stream string
	if n, err := fmt.Sscanf(name, "a%d-r%d.%s", &k.attempt, &k.rank, &stream); n != 3 || err != nil {
		return k, false
	}
	k.stream = Stream(stream)
	return k, k.name() == name && (k.stream == Out || k.stream == Err)
}

// parseLine takes the time off a line. ok is false for what is no line of ours,
// such as one that a crash has cut.
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
