package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// logFiles are the files with the events of a directory's log; none of a
// server's.
func (s *Store) logFiles() ([]string, error) {
	if IsURL(s.opts.Location) {
		return nil, nil
	}
	streams, err := streamsOf(filepath.Join(s.Location, "log"))
	if err != nil {
		return nil, err
	}
	var files []string
	for _, stream := range streams {
		some, err := s.inside().Glob(filepath.Join(stream, "msgs"), "*.blk")
		if err != nil {
			return nil, fmt.Errorf("list the files of the log: %w", err)
		}
		files = append(files, some...)
	}
	return files, nil
}

// onDisk holds the log to be in its directory: a server goes on to answer from
// its memory, and from files that are open, when they were deleted. had are the
// files before the reading. Their sizes say nothing: the server compresses a
// block when it begins the next one.
func (s *Store) onDisk(had []string) (findings []LogFinding, err error) {
	if IsURL(s.opts.Location) {
		return nil, nil
	}
	has, err := s.logFiles()
	if err != nil {
		return nil, err
	}
	const then = "its server goes on with what it has in memory: save that by `ckptstore events --json` before that process ends, then restore log/ from a backup"
	if len(has) == 0 {
		return []LogFinding{{Problem: fmt.Sprintf("there is no file of it in %s; %s", filepath.Join(s.Location, "log"), then)}}, nil
	}
	gone, err := s.deleted()
	if err != nil {
		return nil, err
	}
	// The files of a stream that was cut meanwhile are gone as they should be, with
	// its directory.
	for _, path := range had {
		if !slices.Contains(has, path) && !slices.Contains(gone, path) && exists(filepath.Dir(path)) {
			gone = append(gone, path)
		}
	}
	for _, path := range gone {
		if _, err := os.Stat(path); err == nil {
			findings = append(findings, LogFinding{Problem: fmt.Sprintf("its file %s is not the one that its server writes; %s", path, then)})
			continue
		}
		findings = append(findings, LogFinding{Problem: fmt.Sprintf("its file %s was deleted; %s", path, then)})
	}
	return findings, nil
}

// deleted are the blocks that the owner has open, as the one that it writes, and
// whose names are gone. Of an owner on another machine, or of another user, the
// system does not tell.
func (s *Store) deleted() (gone []string, err error) {
	process := "self"
	if s.owner != nil && !s.Owns() {
		c, err := readCard(s.Location)
		if err != nil {
			return nil, err
		}
		if host, err := os.Hostname(); err != nil || host != c.Host {
			return nil, err
		}
		process = strconv.Itoa(c.PID)
	}
	dir := filepath.Join("/proc", process, "fd")
	open, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrPermission) || errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look at the files that the log's server has open: %w", err)
	}
	for _, e := range open {
		path, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil {
			continue // closed since
		}
		path, is := strings.CutSuffix(path, " (deleted)")
		if is && filepath.Ext(path) == ".blk" && strings.HasPrefix(path, filepath.Join(s.Location, "log")+"/") && !slices.Contains(gone, path) {
			gone = append(gone, path)
		}
	}
	return gone, nil
}
