package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/internal/storm/check"
)

// judge checks the store after the storm, with the store's own commands and without
// them.
func (s *storm) judge(ctx context.Context) error {
	s.log("judge")
	stop, err := s.own(ctx, s.store)
	if err != nil {
		return err
	}
	err = s.judgeOwned(ctx)
	if err2 := stop(); err == nil {
		err = err2
	}
	if err != nil {
		return err
	}
	return s.judgeBackup(ctx)
}

func (s *storm) judgeOwned(ctx context.Context) error {
	var verified struct {
		Log      struct{ Events uint64 }
		Findings []json.RawMessage
	}
	if err := s.answer(ctx, &verified, "verify", "--json"); err != nil {
		s.find("verify: %v", err)
	}
	for _, f := range verified.Findings {
		s.find("verify: %s", f)
	}
	s.figures.LogEvents = verified.Log.Events
	var views struct{ Equal bool }
	if err := s.answer(ctx, &views, "views", "verify", "--json"); err != nil {
		s.find("views verify: %v", err)
	}
	if s.figures.ViewsEqual = views.Equal; !views.Equal {
		s.find("the views do not match the log")
	}
	var err error
	s.figures.Check, err = check.Run(ctx, check.Options{
		Bin: s.bin, Store: s.store, Journals: s.acks, Env: s.env, Scratch: s.dir, Settled: true,
	})
	if err != nil {
		return fmt.Errorf("check the store: %w", err)
	}
	if len(s.backups) == 0 && s.canBackUp() {
		if s.backUp(ctx, -1); len(s.backups) == 0 {
			s.find("no backup could be made, not even after the storm")
		}
	}
	if s.figures.Check.Acknowledged == 0 || s.figures.Check.Listed == 0 {
		s.find("nothing was acknowledged, or nothing is listed: the storm proves nothing")
	}
	return nil
}

// judgeBackup opens the newest backup in place, and the store restored from it. Both
// must hold everything that was acknowledged before the backup began.
func (s *storm) judgeBackup(ctx context.Context) error {
	if len(s.backups) == 0 {
		return nil
	}
	newest := s.backups[len(s.backups)-1]
	s.log("judge %s", newest.dir)
	o := check.Options{Bin: s.bin, Store: newest.dir, Journals: s.acks, Sizes: newest.sizes, Env: s.env}
	lying, err := check.Run(ctx, o)
	if err != nil {
		return fmt.Errorf("check the backup: %w", err)
	}
	s.figures.Backup = &lying
	o.Store, o.Scratch = filepath.Join(s.dir, "restored"), s.dir
	restore := s.command(ctx, filepath.Join(s.bin, "ckptstore"), "restore", newest.dir, "--store", o.Store)
	if out, err := restore.CombinedOutput(); err != nil {
		return fmt.Errorf("restore: %w: %s", err, out)
	}
	stop, err := s.own(ctx, o.Store)
	if err != nil {
		return fmt.Errorf("open the restored store: %w", err)
	}
	restored, err := check.Run(ctx, o)
	s.figures.Restored = &restored
	if err2 := stop(); err == nil {
		err = err2
	}
	if err != nil {
		return fmt.Errorf("check the restored store: %w", err)
	}
	if lying.Listed != restored.Listed || lying.Acknowledged != restored.Acknowledged || lying.Listed == 0 {
		s.find("the backup has %d checkpoints and the restored store %d, of %d and %d acknowledged ones", lying.Listed, restored.Listed, lying.Acknowledged, restored.Acknowledged)
	}
	return nil
}

// own starts a process that owns a store, so that the commands of a check need not open
// it each time.
func (s *storm) own(ctx context.Context, store string) (stop func() error, err error) {
	cmd := exec.Command(filepath.Join(s.bin, "ckptstore"), "serve", "--store", store, "--wait", waitForOwner)
	cmd.Env, cmd.Dir = s.env, s.dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out := s.output("serve")
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	deadline := time.Now().Add(2 * time.Minute)
	for {
		text, err := os.ReadFile(filepath.Join(store, "owner.json"))
		var owner struct{ PID int }
		if err == nil && json.Unmarshal(text, &owner) == nil && owner.PID == cmd.Process.Pid {
			break
		}
		select {
		case err := <-ended:
			_ = out.Close()
			return nil, fmt.Errorf("serve %s: ended: %w: see logs/serve.log", store, err)
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			_ = cmd.Process.Kill()
			_, _ = <-ended, out.Close()
			return nil, fmt.Errorf("serve %s: does not own it after 2 minutes: see logs/serve.log", store)
		}
	}
	return func() error {
		defer func() { _ = out.Close() }()
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			return err
		}
		select {
		case err := <-ended:
			return err
		case <-time.After(time.Minute):
			_, _ = cmd.Process.Kill(), <-ended
			return fmt.Errorf("serve %s: did not end within a minute after SIGTERM", store)
		}
	}, nil
}

// answer runs a command of the store and decodes its output.
func (s *storm) answer(ctx context.Context, into any, args ...string) error {
	within, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	out, err := s.ckptstore(within, args...).Output()
	if json.Unmarshal(out, into) != nil && err == nil {
		err = fmt.Errorf("%.300q is not JSON", out)
	}
	return err
}

// leftovers looks for resources that the storm's processes should have released.
func (s *storm) leftovers() {
	left := s.staging()
	s.figures.StagingLeft = len(left)
	for _, path := range left {
		s.find("%s is left in shared memory", path)
	}
}
