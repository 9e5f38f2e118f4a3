// Package kubernetes checks the manifests of this directory: against the types of the APIs,
// where an unknown member is an error, and against what the programs need. It is a module of
// its own so that the store does not depend on the types.
package kubernetes_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	trainer "github.com/kubeflow/trainer/v2/pkg/apis/trainer/v1alpha1"
	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	apps "k8s.io/api/apps/v1"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	rbac "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	jobset "sigs.k8s.io/jobset/api/jobset/v1alpha2"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

// kinds has an empty object for each kind that manifests have.
var kinds = map[string]func() any{
	"v1/Service":                                           func() any { return new(core.Service) },
	"v1/ServiceAccount":                                    func() any { return new(core.ServiceAccount) },
	"v1/PersistentVolumeClaim":                             func() any { return new(core.PersistentVolumeClaim) },
	"batch/v1/Job":                                         func() any { return new(batch.Job) },
	"apps/v1/Deployment":                                   func() any { return new(apps.Deployment) },
	"networking.k8s.io/v1/NetworkPolicy":                   func() any { return new(networking.NetworkPolicy) },
	"rbac.authorization.k8s.io/v1/Role":                    func() any { return new(rbac.Role) },
	"rbac.authorization.k8s.io/v1/RoleBinding":             func() any { return new(rbac.RoleBinding) },
	"jobset.x-k8s.io/v1alpha2/JobSet":                      func() any { return new(jobset.JobSet) },
	"trainer.kubeflow.org/v1alpha1/ClusterTrainingRuntime": func() any { return new(trainer.ClusterTrainingRuntime) },
	"trainer.kubeflow.org/v1alpha1/TrainJob":               func() any { return new(trainer.TrainJob) },
	"monitoring.coreos.com/v1/PodMonitor":                  func() any { return new(monitoring.PodMonitor) },
}

// decode decodes the documents of a manifest. An unknown or repeated member fails the test.
func decode(t *testing.T, what string, text []byte) (objects []any) {
	t.Helper()
	for _, doc := range bytes.Split(text, []byte("\n---\n")) {
		var head unstructured.Unstructured
		if err := yaml.Unmarshal(doc, &head.Object); err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		kind := head.GetAPIVersion() + "/" + head.GetKind()
		empty := kinds[kind]
		if empty == nil {
			t.Fatalf("%s: no type for %s", what, kind)
		}
		object := empty()
		if err := yaml.UnmarshalStrict(doc, object); err != nil {
			t.Errorf("%s: %s: %v", what, kind, err)
		}
		objects = append(objects, object)
	}
	return objects
}

// manifests returns the objects of all manifests by file, and those of serve as kustomize
// makes them.
func manifests(t *testing.T) map[string][]any {
	t.Helper()
	files, err := filepath.Glob("*.yaml")
	if err != nil || len(files) < 5 {
		t.Fatalf("%d manifests: %v", len(files), err)
	}
	all := map[string][]any{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		all[file] = decode(t, file, text)
	}
	for _, dir := range []string{"serve", "serve/podmonitor"} {
		disk := filesys.MakeFsOnDisk()
		made, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(disk, dir)
		if err != nil {
			t.Fatalf("kustomize build %s: %v", dir, err)
		}
		text, err := made.AsYaml()
		if err != nil {
			t.Fatal(err)
		}
		all[dir] = decode(t, dir, text)
	}
	return all
}

// jobs returns the specifications of jobs in an object, with the container that trains.
func jobs(object any) (all []batch.JobSpec) {
	switch o := object.(type) {
	case *batch.Job:
		all = append(all, o.Spec)
	case *jobset.JobSet:
		for _, r := range o.Spec.ReplicatedJobs {
			all = append(all, r.Template.Spec)
		}
	case *trainer.ClusterTrainingRuntime:
		for _, r := range o.Spec.Template.Spec.ReplicatedJobs {
			all = append(all, r.Template.Spec)
		}
	}
	return all
}

// flag returns the value of a flag in a command line.
func flag(command []string, name string) string {
	for i, arg := range command {
		if arg == name && i+1 < len(command) {
			return command[i+1]
		}
		if value, ok := strings.CutPrefix(arg, name+"="); ok {
			return value
		}
	}
	return ""
}

// Each pod runs as any user without rights, and has what the programs need.
func TestPods(t *testing.T) {
	pods := 0
	for file, objects := range manifests(t) {
		for _, object := range objects {
			var specs []core.PodSpec
			for _, job := range jobs(object) {
				specs = append(specs, job.Template.Spec)
			}
			if d, ok := object.(*apps.Deployment); ok {
				specs = append(specs, d.Spec.Template.Spec)
			}
			for _, pod := range specs {
				pods++
				for _, err := range restricted(pod) {
					t.Errorf("%s: %v", file, err)
				}
			}
		}
	}
	if pods != 5 {
		t.Errorf("%d pods, want 5", pods)
	}
}

// restricted returns where a pod has rights that it does not need, by the profile Restricted
// of Kubernetes and more.
func restricted(pod core.PodSpec) (wrong []error) {
	bad := func(format string, args ...any) { wrong = append(wrong, fmt.Errorf(format, args...)) }
	s := pod.SecurityContext
	if s == nil || s.RunAsNonRoot == nil || !*s.RunAsNonRoot || s.RunAsUser == nil || *s.RunAsUser == 0 || s.FSGroup == nil || s.SeccompProfile == nil || s.SeccompProfile.Type != core.SeccompProfileTypeRuntimeDefault {
		bad("security context of the pod: %v", s)
	}
	if pod.AutomountServiceAccountToken == nil || *pod.AutomountServiceAccountToken {
		bad("the pod has a token of the API server")
	}
	volumes := map[string]core.Volume{}
	for _, v := range pod.Volumes {
		volumes[v.Name] = v
	}
	for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
		s := c.SecurityContext
		if s == nil || s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation ||
			s.Capabilities == nil || !slices.Equal(s.Capabilities.Drop, []core.Capability{"ALL"}) || len(s.Capabilities.Add) > 0 {
			bad("security context of %s: %v", c.Name, s)
		}
		if len(c.Command) == 0 {
			bad("%s has no command, and that of the image is trainer", c.Name)
		}
		mounted := map[string]core.Volume{}
		for _, m := range c.VolumeMounts {
			v, ok := volumes[m.Name]
			if !ok {
				bad("%s mounts %s, which is no volume", c.Name, m.Name)
			}
			mounted[m.MountPath] = v
		}
		if mounted["/tmp"].EmptyDir == nil || mounted["/ckpts"].PersistentVolumeClaim == nil {
			bad("%s has no /tmp for its sockets, or no claim at /ckpts", c.Name)
		}
		if !strings.HasPrefix(flag(c.Command, "--store"), "/ckpts/") {
			bad("%s: the store is not in a directory of its own on the claim", c.Name)
		}
	}
	return wrong
}

// Each job ends or retries by the trainer's exit codes, and gives the trainer the time and the
// memory that its command line asks for.
func TestJobs(t *testing.T) {
	seen := 0
	for file, objects := range manifests(t) {
		for _, object := range objects {
			for _, job := range jobs(object) {
				seen++
				pod := job.Template.Spec
				c := pod.Containers[0]
				var rules []string
				for _, r := range job.PodFailurePolicy.Rules {
					rule := string(r.Action)
					if r.OnExitCodes != nil {
						rule += fmt.Sprintf(" %v %s %v", *r.OnExitCodes.ContainerName == c.Name, r.OnExitCodes.Operator, r.OnExitCodes.Values)
					}
					for _, p := range r.OnPodConditions {
						rule += fmt.Sprint(" ", p.Type, "=", p.Status)
					}
					rules = append(rules, rule)
				}
				want := []string{"FailJob true In [64]", "Ignore DisruptionTarget=True", "Ignore true In [75]"}
				if !slices.Equal(rules, want) {
					t.Errorf("%s: rules %q, want %q", file, rules, want)
				}
				if pod.RestartPolicy != core.RestartPolicyNever || job.CompletionMode == nil || *job.CompletionMode != batch.IndexedCompletion {
					t.Errorf("%s: restartPolicy %s, completionMode %v", file, pod.RestartPolicy, job.CompletionMode)
				}
				grace := 30 * time.Second
				for _, name := range []string{"--preempt-grace", "--grace", "--drain-timeout"} {
					d, err := time.ParseDuration(flag(c.Command, name))
					if err != nil {
						t.Errorf("%s: %s: %v", file, name, err)
					}
					grace += d
				}
				if have := time.Duration(*pod.TerminationGracePeriodSeconds) * time.Second; have < grace {
					t.Errorf("%s: terminationGracePeriodSeconds is %v, the trainer may take %v", file, have, grace)
				}
				shm := slices.IndexFunc(c.VolumeMounts, func(m core.VolumeMount) bool { return m.MountPath == "/dev/shm" })
				if shm < 0 {
					t.Fatalf("%s: nothing at /dev/shm", file)
				}
				v := pod.Volumes[slices.IndexFunc(pod.Volumes, func(v core.Volume) bool { return v.Name == c.VolumeMounts[shm].Name })]
				if v.EmptyDir == nil || v.EmptyDir.Medium != core.StorageMediumMemory || v.EmptyDir.SizeLimit == nil || v.EmptyDir.SizeLimit.Cmp(*c.Resources.Limits.Memory()) >= 0 {
					t.Errorf("%s: /dev/shm is %v, the memory limit %v", file, v.EmptyDir, c.Resources.Limits.Memory())
				}
			}
		}
	}
	if seen != 4 {
		t.Errorf("%d jobs, want 4", seen)
	}
}

// The pods of a job find its first one: by the name that its Service gives it.
func TestEndpoint(t *testing.T) {
	all := manifests(t)
	service, job := all["job-nodes.yaml"][0].(*core.Service), all["job-nodes.yaml"][1].(*batch.Job)
	c := job.Spec.Template.Spec.Containers[0]
	want := fmt.Sprintf("%s-0.%s:%d", job.Name, service.Name, service.Spec.Ports[0].Port)
	if got := flag(c.Command, "--rdzv-endpoint"); got != want || job.Spec.Template.Spec.Subdomain != service.Name {
		t.Errorf("endpoint %s, subdomain %s; want %s", got, job.Spec.Template.Spec.Subdomain, want)
	}
	if s := service.Spec; s.ClusterIP != core.ClusterIPNone || !s.PublishNotReadyAddresses || s.Selector[batch.JobNameLabel] != job.Name {
		t.Errorf("the Service does not give the pods names: %v", s)
	}
	if got := flag(c.Command, "--nnodes"); got != fmt.Sprint(*job.Spec.Completions) || *job.Spec.Completions != *job.Spec.Parallelism {
		t.Errorf("--nnodes %s, %d completions, %d at once", got, *job.Spec.Completions, *job.Spec.Parallelism)
	}
	set := all["jobset.yaml"][0].(*jobset.JobSet)
	spec := set.Spec.ReplicatedJobs[0].Template.Spec
	env := map[string]string{}
	for _, e := range spec.Template.Spec.Containers[0].Env {
		env[e.Name] = e.Value
	}
	if want := fmt.Sprintf("%s-%s-0-0.%s", set.Name, set.Spec.ReplicatedJobs[0].Name, set.Name); env["PET_MASTER_ADDR"] != want {
		t.Errorf("PET_MASTER_ADDR is %s, want %s", env["PET_MASTER_ADDR"], want)
	}
	if env["PET_NNODES"] != fmt.Sprint(*spec.Completions) {
		t.Errorf("PET_NNODES is %s, %d completions", env["PET_NNODES"], *spec.Completions)
	}
}

// The objects of serve refer to each other.
func TestServe(t *testing.T) {
	var pod core.PodTemplateSpec
	selectors := map[string]map[string]string{}
	account := ""
	for _, object := range slices.Concat(manifests(t)["serve"], manifests(t)["serve/podmonitor"]) {
		switch o := object.(type) {
		case *apps.Deployment:
			pod = o.Spec.Template
			selectors["deployment"] = o.Spec.Selector.MatchLabels
			if *o.Spec.Replicas != 1 || o.Spec.Strategy.Type != apps.RecreateDeploymentStrategyType {
				t.Errorf("a store has one owner, the deployment has %d, replaced by %s", *o.Spec.Replicas, o.Spec.Strategy.Type)
			}
		case *core.Service:
			selectors["service"] = o.Spec.Selector
		case *core.ServiceAccount:
			account = o.Name
		case *networking.NetworkPolicy:
			selectors["network policy"] = o.Spec.PodSelector.MatchLabels
		case *monitoring.PodMonitor:
			selectors["pod monitor"] = o.Spec.Selector.MatchLabels
		}
	}
	for what, labels := range selectors {
		for name, value := range labels {
			if pod.Labels[name] != value {
				t.Errorf("the %s selects %s=%s, the pod has %s", what, name, value, pod.Labels[name])
			}
		}
	}
	if len(selectors) != 4 || pod.Spec.ServiceAccountName != account || account == "" {
		t.Errorf("selectors of %v; the account of the pod is %q, want %q", selectors, pod.Spec.ServiceAccountName, account)
	}
	c := pod.Spec.Containers[0]
	for what, probe := range map[string]*core.Probe{"/healthz": c.LivenessProbe, "/readyz": c.ReadinessProbe} {
		if probe == nil || probe.HTTPGet == nil || probe.HTTPGet.Path != what || probe.HTTPGet.Scheme != core.URISchemeHTTPS {
			t.Errorf("probe of %s: %v", what, probe)
		}
	}
	if c.StartupProbe == nil {
		t.Error("a store that opens slowly is killed")
	}
}
