{{/* Common to all pods: no rights in the cluster, and no more on the node than the label `restricted` allows. */}}
{{- define "dvp.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .user }}
  runAsGroup: {{ .user }}
  fsGroup: {{ .user }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "dvp.podMetadata" -}}
labels: {app: {{ .app }}}
annotations:
  dvp-rl/restart: {{ .root.Values.restart | quote }}
{{- end }}

{{/* Placement of the pods of `rollout`, `trainer` or `harness` on nodes. */}}
{{- define "dvp.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- end }}

{{- define "dvp.image" -}}
image: {{ .image | quote }}
{{- with .root.Values.imagePullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{- define "dvp.hardened" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* The environment of these pods: the chart's variables, then the user's settings and variables. Duplicate names
  fail: which of two values counts would depend on who applies them. */}}
{{- define "dvp.env" -}}
{{- $entries := list .fixed (include "dvp.settings" (dict "prefix" .prefix "settings" .settings)) }}
{{- with .env }}
{{- $entries = append $entries (toYaml .) }}
{{- end }}
{{- $seen := dict }}
{{- range join "\n" $entries | fromYamlArray }}
{{- if hasKey $seen .name }}
{{- fail (printf "%s is set by the chart or set twice: remove it from %s.settings or %s.env" .name $.of $.of) }}
{{- end }}
{{- $_ := set $seen .name true }}
{{- end }}
{{- join "\n" $entries }}
{{- end }}

{{/* Settings as environment variables: {model: {device: cuda}} becomes PREFIX__MODEL__DEVICE=cuda. null sets nothing. */}}
{{- define "dvp.settings" -}}
{{- $prefix := .prefix }}
{{- range $name, $value := .settings }}
{{- $variable := printf "%s__%s" $prefix (upper $name) }}
{{- if kindIs "map" $value }}
{{- include "dvp.settings" (dict "prefix" $variable "settings" $value) }}
{{- else if not (kindIs "invalid" $value) }}
- {name: {{ $variable }}, value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{/* The network interface for sending weights from trainer to replicas; empty unless trainer.settings choose that route. */}}
{{- define "dvp.interface" -}}
{{- if eq (dig "weights" "route" "" .Values.trainer.settings) "distributed" -}}
{{ dig "weights" "interface" "eth0" .Values.trainer.settings }}
{{- end }}
{{- end }}

{{/* The inputs in a pod: a volume and, for an image, the container that copies them into it. */}}
{{- define "dvp.inputsVolume" -}}
{{- if .Values.inputs.claim -}}
- name: inputs
  persistentVolumeClaim: {claimName: {{ .Values.inputs.claim | quote }}, readOnly: true}
{{- else -}}
- {name: inputs, emptyDir: {sizeLimit: {{ .Values.inputs.size }}}}
{{- end }}
{{- end }}

{{- define "dvp.inputsCopy" -}}
{{- if not .Values.inputs.claim -}}
- name: inputs
  {{- include "dvp.image" (dict "root" . "image" .Values.inputs.image) | nindent 2 }}
  command: [cp, -r, /inputs/., /target]
  resources:
    requests: {cpu: 100m, memory: 64Mi, ephemeral-storage: {{ .Values.inputs.size }}}
    limits: {cpu: "1", memory: 256Mi, ephemeral-storage: {{ .Values.inputs.size }}}
  {{- include "dvp.hardened" . | nindent 2 }}
  volumeMounts:
    - {name: inputs, mountPath: /target}
{{- end }}
{{- end }}

{{/* A volume claim that outlives the release. */}}
{{- define "dvp.claim" -}}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ .name }}
  annotations: {helm.sh/resource-policy: keep}
spec:
  {{- include "dvp.claimSpec" .volume | nindent 2 }}
{{- end }}

{{- define "dvp.claimSpec" -}}
accessModes: [ReadWriteOnce]
{{- with .storageClass }}
storageClassName: {{ . | quote }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end }}
