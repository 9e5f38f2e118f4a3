package store

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/ckptstore/ckptstore/events/jetlog"
)

// logFiles are the files with the events of a directory's log; none of a
// server's.
func (s *Store) logFiles() ([]string, error) {
	if IsURL(s.opts.Location) {
		return nil, nil
	}
	files, err := filepath.Glob(filepath.Join(s.Location, "log", "jetstream", "*", "streams", jetlog.Stream, "msgs", "*.blk"))
	if err != nil {
		return nil, fmt.Errorf("list the files of the log: %w", err)
	}
	return files, nil
}

// onDisk holds the log to be in its directory: a server goes on to answer from
// its memory, and from files that are open, when they were deleted. had are the
// files before the reading, want the bytes of what it read at least.
func (s *Store) onDisk(had []string, want uint64) (findings []LogFinding, err error) {
	if IsURL(s.opts.Location) {
		return nil, nil
	}
	has, err := s.logFiles()
	if err != nil {
		return nil, err
	}
	for _, path := range had {
		if !slices.Contains(has, path) {
			findings = append(findings, LogFinding{Problem: fmt.Sprintf("its file %s was deleted while it was read", path)})
		}
	}
	size := uint64(0)
	for _, path := range has {
		info, err := os.Stat(path)
		if err != nil {
			return nil, fmt.Errorf("look at the files of the log: %w", err)
		}
		size += uint64(info.Size()) //nolint:gosec // a file's size
	}
	if size < want {
		findings = append(findings, LogFinding{Problem: fmt.Sprintf("its server answers, and has %d bytes of events, but the %d files of them in %s have %d: some were deleted or cut under it; end no process of this store before `ckptstore events --json` has saved the log, then restore log/ from a backup",
			want, len(has), filepath.Join(s.Location, "log"), size)})
	}
	return findings, nil
}
