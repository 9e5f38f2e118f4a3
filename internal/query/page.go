package query

import (
	"fmt"
	"strconv"

	"github.com/ckptstore/ckptstore/projections"
)

// A list may be asked for in pages: at most Limit rows that follow the row with the key After
// in the order of the list. The key of a row is what After of the next page is:
//
//	runs         name
//	trials       name
//	jobs         ID
//	restores     load
//	attempts     number
//	workers      rank
//	checkpoints  begun_seq
//
// A row that a list gets meanwhile appears if its place is on a later page. Without Limit a
// list is whole.

// page returns the rows of a page. passed reports whether a row is on an earlier one.
func page[T any](rows []T, err error, p Params, passed func(T) bool) ([]T, error) {
	if err != nil || p.Limit == 0 && p.After == "" {
		return rows, err
	}
	from := 0
	for p.After != "" && from < len(rows) && passed(rows[from]) {
		from++
	}
	rows = rows[from:]
	if p.Limit > 0 {
		rows = rows[:min(p.Limit, len(rows))]
	}
	return rows, nil
}

// pageByNumber is page for rows with ascending numbers.
func pageByNumber[T any](rows []T, err error, p Params, number func(T) int) ([]T, error) {
	if err != nil || p.After == "" {
		return page(rows, err, p, nil)
	}
	after, err := strconv.Atoi(p.After)
	if err != nil {
		return nil, fmt.Errorf("%w: after %q is no number", projections.ErrReference, p.After)
	}
	return page(rows, nil, p, func(row T) bool { return number(row) <= after })
}

// jobsPage returns the jobs after one of them, the newest first.
func jobsPage(rows []projections.Job, err error, p Params) ([]projections.Job, error) {
	found := err != nil || p.After == ""
	for _, job := range rows {
		found = found || job.ID == p.After
	}
	if !found {
		return nil, &projections.NotFoundError{What: "job", Ref: p.After}
	}
	behind := false
	return page(rows, err, p, func(job projections.Job) bool {
		if behind {
			return false
		}
		behind = job.ID == p.After
		return true
	})
}

// trialsPage returns the trials after one of them, by name. The reports of the others are not
// read.
func trialsPage(r projections.Reader, p Params) ([]projections.Trial, error) {
	if p.Limit == 0 && p.After == "" {
		return projections.Trials(r, p.Run)
	}
	launches, err := projections.AllLaunches(r, p.Run, true)
	if err != nil || len(launches) == 0 {
		return nil, err
	}
	rows, err := page(launches[0].Trials, nil, p, func(t projections.Trial) bool { return t.Name <= p.After })
	for i := range rows {
		if err == nil {
			rows[i], err = projections.GetTrial(r, p.Run, rows[i].Name)
		}
	}
	return rows, err
}

// checkpointsPage returns the checkpoints before one of them, the newest first.
func checkpointsPage(r projections.Reader, p Params) ([]projections.Checkpoint, error) {
	if p.Limit == 0 && p.After == "" {
		return projections.Checkpoints(r, p.Run, p.All)
	}
	before := uint64(0)
	if p.After != "" {
		var err error
		if before, err = strconv.ParseUint(p.After, 10, 64); err != nil || before == 0 {
			return nil, fmt.Errorf("%w: after %q is no begun_seq of a checkpoint", projections.ErrReference, p.After)
		}
	}
	limit := p.Limit
	if limit == 0 {
		limit = int(^uint(0) >> 1)
	}
	return projections.CheckpointsBefore(r, p.Run, p.All, before, limit)
}
